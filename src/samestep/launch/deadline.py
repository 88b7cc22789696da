"""A launch's deadline: after it, each rank's stack is written and the launch fails."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from samestep.errors import TrainingFailed
from samestep.launch.end import signal_ranks

STACKS_S = 0.5  # that the ranks have to write where they stand


class Deadline:
    """seconds: from now; None: there is no deadline. folder: of the ranks, for stack-rankR.txt."""

    def __init__(self, seconds: float | None, folder: Path) -> None:
        self._seconds, self._folder, self._began = seconds, folder, time.monotonic()

    def is_over(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._began > self._seconds

    def fail(self) -> None:
        """Has each rank write its stack. Raises TrainingFailed."""
        signal_ranks(self._folder, signal.SIGUSR1)
        time.sleep(STACKS_S)
        raise TrainingFailed(
            f"nothing ended within {self._seconds:.0f} s; where each rank stood is in {self._folder}/stack-rank*.txt"
        )
