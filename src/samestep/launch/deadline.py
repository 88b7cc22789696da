"""The deadline of a launch. When it is over, each rank writes its stack and the launch fails."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from samestep.errors import TrainingFailed
from samestep.launch.end import signal_ranks
from samestep.launch.stacks import sizes, wait_until_written


class Deadline:
    """A time limit that starts now. seconds: None: no limit. folder: of the ranks, for stack-rankR.txt."""

    def __init__(self, seconds: float | None, folder: Path) -> None:
        self._seconds, self._folder, self._started_at = seconds, folder, time.monotonic()

    def is_over(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._started_at > self._seconds

    def fail(self) -> None:
        """Makes each rank write its stack, and raises TrainingFailed."""
        before = sizes(self._folder.glob("stack-rank*.txt"))
        signal_ranks(self._folder, signal.SIGUSR1)
        wait_until_written(before)
        raise TrainingFailed(
            f"the launch did not end within {self._seconds:.0f} s; the ranks' stacks are {self._folder}/stack-rank*.txt"
        )
