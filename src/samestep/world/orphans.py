"""Prevents orphans: a process that calls `die_with_parent` is killed when its parent ends, in whatever way."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import psutil

COMMAND = "SAMESTEP_COMMAND"  # environment variable: the command that started this process tree, as PID@HOST
# Loaded here, not after a fork, where loading could wait for a lock that no thread releases.
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
CHILD_S = 1.0  # how long a child has to end after a signal
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent(_: object = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel (Linux), or a thread (elsewhere), end this process when its parent ends.

    The first argument is ignored: DataLoader calls its `worker_init_fn` with the worker's number. by: the signal.
    """
    parent = os.getppid()
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, by)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent or _ended(os.environ.get(COMMAND)):  # the parent ended before the two lines above
        os._exit(1)


def end_children() -> None:
    """Ends what this process has started and left running, whatever session it is in. To be called before its end."""
    children = [child for child in psutil.Process().children(recursive=True) if not _ends_by_itself(child)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.Error):  # it has ended, or is another user's
                child.send_signal(number)
        _, children = psutil.wait_procs(children, timeout=CHILD_S)


def _ends_by_itself(child: psutil.Process) -> bool:
    """Whether a process is multiprocessing's resource tracker, which cleans up when its parent has ended."""
    try:
        return "resource_tracker" in " ".join(child.cmdline())
    except psutil.Error:
        return False


def this_command() -> str:
    """Returns the value of COMMAND for this process."""
    return f"{os.getpid()}@{socket.gethostname()}"


def _ended(command: str | None) -> bool:
    """Whether the command that started this process tree has ended already, for example during this one's imports."""
    pid, _, host = (command or "").partition("@")
    if not pid or host != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def guard(marker: str) -> tuple[int, int]:
    """Forks a guard. If this process is killed, in whatever way, it ends all processes with `marker` in COMMAND, and
    their descendants. Returns its pid, and a file descriptor for `dismiss`."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ours)
        return pid, theirs
    os.close(theirs)
    os.setsid()  # out of reach of the terminal's signals
    if not os.read(ours, 1):  # this process has ended without dismissing it
        for number in (signal.SIGTERM, signal.SIGKILL):
            marked = [process for process in psutil.process_iter() if _is_marked(process, marker)]
            for process in {each for one in marked for each in [one, *_descendants(one)]}:
                with suppress(psutil.Error):
                    process.send_signal(number)
            until = time.monotonic() + CHILD_S
            while time.monotonic() < until and any(process.is_running() for process in marked):
                time.sleep(0.02)
    os._exit(0)


def dismiss(pid: int, descriptor: int) -> None:
    """Ends a guard that is needed no more."""
    with suppress(OSError):  # it has been killed
        os.write(descriptor, b"1")
    os.close(descriptor)
    with suppress(OSError):
        os.waitpid(pid, 0)


def _is_marked(process: psutil.Process, marker: str) -> bool:
    with suppress(psutil.Error):
        return process.pid != os.getpid() and bool(process.environ().get(COMMAND) == marker)
    return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []
