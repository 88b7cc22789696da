"""Waits for the processes that samestep starts: says where one is that takes long, and ends it at a deadline.

    wait_for(process, "the job my_job.py is still being built", place=lambda: …, deadline_s=600)

    samestep: the job my_job.py is still being built after 60 s: it is at my_job.py:12, load (asleep)

A process that works for long is not ended without a deadline: it may read a large file. Every wait in samestep for a
process of its own goes through here, or has a timeout (tests/world/test_waiting.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from samestep.errors import TrainingFailed, say

TELL_S = 60.0  # until it is told where a process is; again after twice that, four times, …
KILLED_S = 5.0  # for a process that was killed to be gone: one that waits for a disk may never be
INTERRUPTED_S = 0.25  # as in subprocess.call
POLL_S = 0.01


class Waited(Protocol):
    """A process that is waited for: a subprocess.Popen, or a forked worker."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Patience:
    """How long something is waited for. Call check() again and again while it is.

    what: a clause, as 'the job my_job.py is still being built'. place: returns where it is, '' unknown. tell_s: when
    that is first told. deadline_s: when check() raises TrainingFailed; None: never.
    """

    def __init__(
        self,
        what: str,
        place: Callable[[], str] | None = None,
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
            raise TrainingFailed(f"{self._sentence(self._deadline_s)}; see what it does there, or raise --deadline")
        if passed > self._tell_s:
            self._tell_s *= 2
            say(self._sentence(passed))

    def _sentence(self, seconds: float) -> str:
        place = self._place() if self._place else ""
        return f"{self._what} after {seconds:.0f} s" + (f": it is {place}" if place else "")


def wait_for(
    process: Waited,
    what: str,
    place: Callable[[], str] | None = None,
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
