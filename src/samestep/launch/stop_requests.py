"""Requests to stop a training after a step: Ctrl-C, or SIGUSR1, which a scheduler sends some time before its limit."""

from __future__ import annotations

import signal
from pathlib import Path

from samestep.errors import say
from samestep.launch.end import signal_ranks
from samestep.records.record import Progress


class StopRequests:
    """Passes a request on to the ranks in `folder`, once they train. accepted: False where a launch is just ended."""

    def __init__(self, folder: Path, *, accepted: bool) -> None:
        self._folder, self._accepted = folder, accepted
        self._signals: list[int] = []
        self._stopping = False
        self._told_attempt: int | None = None
        if accepted and hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, lambda number, _: self._signals.append(number))

    def interrupted(self, progress: Progress) -> bool:
        """Whether an interrupt is a request to stop after a step. A second one is not, nor one before the training."""
        if not self._accepted or self._stopping or progress.done is None:
            return False
        self._stop("interrupt again to end at once")
        return True

    def pass_on(self, progress: Progress) -> None:
        """Tells the ranks; those that torchrun has started again are told again."""
        if progress.done is None:
            return
        if self._signals and not self._stopping:
            self._stop("asked by SIGUSR1")
        if self._stopping and progress.attempt != self._told_attempt:
            self._told_attempt = progress.attempt
            signal_ranks(self._folder, signal.SIGUSR2)

    def _stop(self, why: str) -> None:
        say(f"stopping after a step; {why}")
        self._stopping = True
