"""Processes that samestep starts: none outlives the command, and each wait says where the process is that takes long.

    wait_for(process, message("job_is_being_built", job="my_job.py"), place=lambda: …, deadline_s=600)

    samestep: the job my_job.py is still being built after 60 s: it is at my_job.py:12, load (asleep)

A process that works for long is not ended without a deadline: it may read a large file. Every wait in samestep for a
process of its own goes through here, or has a timeout (tests/world/test_processes.py).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, Protocol

import psutil

from samestep.errors import TrainingFailed, say
from samestep.message import Message
from samestep.world.regular_files import open_new

COMMAND = "SAMESTEP_COMMAND"  # environment variable: the command that started this process tree, as PID@HOST
# Loaded here, not after a fork, where loading could wait for a lock that no thread releases.
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
# On which a rank of a script that is not ours writes its stacks. The system ignores it where nothing handles it, so it
# ends no process that has just become another program. SIGUSR1 is the script's own: Slurm may send it.
STACKS = signal.SIGURG
_stack_files: list[IO[str]] = []  # open as long as the process lives
CHILD_S = 1.0  # how long a child has to end after a signal
POLL_S = 0.01
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent(_: object = None, *, ends_by: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel (Linux), or a thread (elsewhere), end this process when its parent ends.

    The first argument is ignored: DataLoader calls its `worker_init_fn` with the worker's number. ends_by: the signal.
    """
    parent = os.getppid()
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, ends_by)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent or _ended(os.environ.get(COMMAND)):  # the parent ended before the two lines above
        os._exit(1)


def end_children() -> None:
    """Ends what this process has started and left running, whatever session it is in. To be called before its end."""
    children = left_running()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            with suppress(psutil.Error):  # it has ended, or is another user's
                child.send_signal(number)
        _, children = psutil.wait_procs(children, timeout=CHILD_S)


def left_running() -> list[psutil.Process]:
    """Returns the descendants of this process that live, but for those that end by themselves when their parent has."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if not _ends_by_itself(child)]


def _ends_by_itself(child: psutil.Process) -> bool:
    """Whether a process has ended, or is multiprocessing's resource tracker, which cleans up after its parent."""
    until = time.monotonic() + CHILD_S
    try:
        # Linux shows no words of a process that is becoming another program, nor of one that is about to be a zombie.
        while not (words := child.cmdline()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return "resource_tracker" in " ".join(words)
    except psutil.NoSuchProcess:  # of which ZombieProcess is one
        return True
    except psutil.Error:
        return False


def write_stacks(path: Path, number: int) -> None:
    """Makes this process write its threads' stacks into a file on a signal. To be called in a script that is not ours.

    Does nothing where the script handles the signal, or where this is not the main thread. number: a signal that ends
    no process where nothing handles it: faulthandler gives it back long before the process ends.
    """
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return
    if threading.current_thread() is not threading.main_thread():
        return
    file = open_new(path, text=True)
    _stack_files.append(file)
    faulthandler.register(number, file=file, all_threads=True)


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
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return pid, writing
    os.close(writing)
    os.setsid()  # out of reach of the terminal's signals
    if not os.read(reading, 1):  # this process has ended without dismissing it
        for number in (signal.SIGTERM, signal.SIGKILL):
            marked = [process for process in psutil.process_iter() if _is_marked(process, marker)]
            descendants = [process for ancestor in marked for process in _descendants(ancestor)]
            for process in {*marked, *descendants}:
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


TELL_S = 60.0  # until it is told where a process is; again after twice that, four times, …
KILLED_S = 5.0  # for a process that was killed to be gone: one that waits for a disk may never be
INTERRUPTED_S = 0.25  # as in subprocess.call


class Waited(Protocol):
    """A process that is waited for: a subprocess.Popen, or a forked worker."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Patience:
    """How long something is waited for. Call check() again and again while it is.

    what: is still going on, as 'the job my_job.py is still being built'. place: returns where it is; None: unknown.
    tell_s: when that is first told. deadline_s: when check() raises TrainingFailed; None: never.
    """

    def __init__(
        self,
        what: Message,
        place: Callable[[], Message | None] | None = None,
        *,
        tell_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._what, self._place, self._deadline_s = what, place, deadline_s
        self._tell_s, self._began = tell_s or TELL_S, time.monotonic()

    def check(self) -> None:
        """Says where it is, when it is time to; raises TrainingFailed when the deadline is over."""
        passed = time.monotonic() - self._began
        if self._deadline_s is not None and passed > self._deadline_s:
            raise TrainingFailed(self._said("deadline_is_over", self._deadline_s))
        if passed > self._tell_s:
            self._tell_s *= 2
            say(self._said("takes_long", passed))

    def _said(self, id: Literal["takes_long", "deadline_is_over"], seconds: float) -> Message:
        place = self._place() if self._place else None
        return Message(id, {"what": self._what, "seconds": seconds, "place": place})


def wait_for(
    process: Waited,
    what: Message,
    place: Callable[[], Message | None] | None = None,
    *,
    tell_s: float | None = None,
    deadline_s: float | None = None,
) -> int:
    """Waits for the end of a process, as Patience describes. Returns its exit code. The process has ended, or was
    killed, when this returns or raises."""
    patience = Patience(what, place, tell_s=tell_s, deadline_s=deadline_s)
    try:
        while (code := process.poll()) is None:
            patience.check()
            time.sleep(POLL_S)
        return code
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):  # the terminal has sent it to the process, too
            process.wait(INTERRUPTED_S)
        raise
    finally:
        if process.poll() is None:
            kill(process)


def kill(process: Waited) -> None:
    """Kills a process, and waits until it is gone; not longer than that takes, because a dead disk may hold it."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)
