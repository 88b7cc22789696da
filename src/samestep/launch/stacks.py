"""Asks processes for their Python stacks, and finds the line of the user's code in them.

A rank writes its stacks on SIGUSR1, with faulthandler, whose handler runs at once and needs no GIL. Its forked loader
workers have inherited the handler and the file.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.message import Message, message
from samestep.world.imports import is_users_code
from samestep.world.processes import LIBC
from samestep.world.regular_files import open_regular

STATES = {
    "R": "process_runs",
    "S": "process_sleeps",
    "D": "process_waits_for_a_disk",
    "T": "process_is_stopped",
    "t": "process_is_stopped_by_a_debugger",
}
STOPPED = ("T", "t")  # of these states
WAIT_S = 2.0  # for a stack, at most
SETTLE_S = 0.1  # a stack is complete when nothing was written for so long
WORKER_FILE, LOADER_FILE = "/torch/utils/data/_utils/worker.py", "/torch/utils/data/dataloader.py"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """A line that a thread is at."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, {self.function}"

    @property
    def is_users(self) -> bool:
        return is_users_code(self.file)


Stack = tuple[Frame, ...]  # of one thread, the innermost line first


def parse(text: str) -> tuple[Stack, ...]:
    """Returns the stacks of a process's threads, the main thread's first, from what faulthandler writes."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (most recent call first)")):
            stacks.append([])
        elif stacks and (match := FRAME.match(line)):
            stacks[-1].append(Frame(match[1], int(match[2]), match[3]))
    return tuple(tuple(stack) for stack in reversed(stacks))  # it writes the newest thread first


def inside_worker(stack: Stack) -> Stack:
    """Returns the part of a stack that is of a loader worker of torch's: a forked one has its parent's lines below."""
    for index, frame in enumerate(stack):
        if frame.function == "_worker_loop" and frame.file.endswith(WORKER_FILE):
            return stack[:index]
    return stack


def users_frame(stack: Sequence[Frame]) -> Frame | None:
    """Returns the innermost line of the user's code; None where there is none."""
    return next((frame for frame in stack if frame.is_users), None)


def place_of(pid: int, file: Path) -> Message:
    """Returns where a process is, 'at my_job.py:12, load (asleep)'. file: where it writes its stacks."""
    state = state_named(state_of(pid))
    threads = parse(ask([pid], file))
    frame = next(filter(None, map(users_frame, threads)), None) or next((stack[0] for stack in threads if stack), None)
    return message("process_is_at", process=pid, frame=str(frame) if frame else f"process {pid}", state=state)


def state_named(state: str) -> Message:
    """Returns a state, as /proc names it, in words."""
    return Message(STATES.get(state, "process_state_is_unknown"))


def ask(pids: Sequence[int], file: Path, number: int = signal.SIGUSR1) -> str:
    """Makes processes write their stacks into `file`, one after the other, and returns what they have written.

    number: the signal. Only processes that handle it, and have `file` open, are asked: others it would end, or they
    would write into whatever has got the file's descriptor. A stopped one is woken for it.
    """
    return "\n".join(_ask(pid, file, number) for pid in pids if handles(pid, number) and has_open(pid, file))


def _ask(pid: int, file: Path, number: int) -> str:
    before = _size(file)
    with suppress(OSError):
        _signal_main_thread(pid, number)
        if state_of(pid) in STOPPED:
            os.kill(pid, signal.SIGCONT)
    wait_until_written({file: before})
    with suppress(OSError), open_regular(file) as written:
        written.seek(before)
        return written.read().decode(errors="replace")
    return ""


def wait_until_written(before: Mapping[Path, int]) -> None:
    """Waits until each file is larger than `before`, in bytes, and none grows any more; WAIT_S seconds at most."""
    until = time.monotonic() + WAIT_S
    latest, changed_at = before, time.monotonic()
    while time.monotonic() < until and (
        any(latest[file] == before[file] for file in before) or time.monotonic() - changed_at < SETTLE_S
    ):
        time.sleep(0.01)
        now = sizes(before)
        if now != latest:
            latest, changed_at = now, time.monotonic()


def _signal_main_thread(pid: int, number: int) -> None:
    """Sends a signal to the main thread. Another thread of a stopped process may take what is sent to the process, and
    the main thread, woken for it, would go on from its line meanwhile."""
    if LIBC is not None and hasattr(LIBC, "tgkill"):  # Linux
        LIBC.tgkill(pid, pid, number)
    else:
        os.kill(pid, number)


def sizes(files: Iterable[Path]) -> Mapping[Path, int]:
    """Returns the bytes of each file; 0 where there is none."""
    return {file: _size(file) for file in files}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. False where that is not known, as on other systems than Linux."""
    with suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return bool(caught and int(caught[1], 16) >> (number - 1) & 1)
    return False


def has_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open: faulthandler knows only its descriptor, which a script may close and reuse."""
    with suppress(OSError):
        wanted, folder = file.stat(), f"/proc/{pid}/fd"
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{descriptor}"), wanted):
                    return True
    return False


def state_of(pid: int) -> str:
    """Returns a process's state as /proc names it: R runs, S sleeps, D waits for a disk, T is stopped; '' unknown."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs, asleep or stopped too."""
    return psutil.pid_exists(pid) and state_of(pid) not in ("Z", "X")
