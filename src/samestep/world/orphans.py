"""No orphans: a process that calls `die_with_parent` is killed when its parent is, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time

import psutil

COMMAND = "SAMESTEP_COMMAND"  # the environment's name for the command that started this tree, as PID@HOST
LIBC = (
    ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
)  # not in a fork, which could wait for a lock
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent(_: object = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel (Linux), or a thread (elsewhere), to end this process when its parent ends.

    The first argument is ignored: DataLoader hands its worker's number to such a function. by: the signal.
    """
    parent = os.getppid()
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, by)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent or _ended(os.environ.get(COMMAND)):  # it ended before the two lines above
        os._exit(1)


def this_command() -> str:
    """What COMMAND says of this process."""
    return f"{os.getpid()}@{socket.gethostname()}"


def _ended(command: str | None) -> bool:
    """Whether the command that started this tree has ended already, perhaps while this process was importing."""
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
