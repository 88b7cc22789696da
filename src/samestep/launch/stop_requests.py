"""Handles requests to stop a training after a step: Ctrl-C, SIGTERM, or the SIGUSR1 that a scheduler sends before its
limit."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from samestep.errors import say
from samestep.launch.end import signal_ranks
from samestep.records.record import Progress, read_progress


class StopRequests:
    """Forwards a request to the ranks of `folder`, once they train.

    accepted: False: an interrupt ends the launch. terminates: whether SIGTERM is a request too. An outer launcher sends
    it to its ranks when one of them has failed, and none of them can train on.
    """

    def __init__(self, folder: Path, *, accepted: bool, terminates: bool = False) -> None:
        self._folder, self._accepted = folder, accepted
        self._signals: list[int] = []
        self._stopping = False
        self._notified_attempt: int | None = None
        # Python allows signal handlers in the main thread only; without one, SIGUSR1 does what it did before.
        self._handles = accepted and hasattr(signal, "SIGUSR1") and current_thread() is main_thread()
        if self._handles:
            self._before = signal.signal(signal.SIGUSR1, lambda number, _: self._signals.append(number))
        self._ends: Any = signal.getsignal(signal.SIGTERM)
        self._terminates = self._handles and terminates and callable(self._ends)
        if self._terminates:
            signal.signal(signal.SIGTERM, self._on_term)

    def close(self) -> None:
        """Puts the signal handler back that was there before."""
        if self._handles:
            signal.signal(signal.SIGUSR1, self._before)
        if self._terminates:
            signal.signal(signal.SIGTERM, self._ends)

    def _on_term(self, number: int, frame: Any) -> None:
        """Takes the first SIGTERM during the training as a request; another ends the launch."""
        if self._stopping or self._signals or read_progress(self._folder).done is None:
            self._ends(number, frame)
        self._signals.append(number)

    def accept_interrupt(self, progress: Progress) -> bool:
        """Takes an interrupt as a request to stop after a step. False for a second one, or one before the training."""
        if not self._accepted or self._stopping or progress.done is None:
            return False
        self._stop("interrupt again to end at once")
        return True

    def forward(self, progress: Progress) -> None:
        """Signals the ranks once, and again after torchrun has restarted them."""
        if progress.done is None:
            return
        if self._signals and not self._stopping:
            self._stop(f"received {signal.Signals(self._signals[0]).name}")
        if self._stopping and progress.attempt != self._notified_attempt:
            self._notified_attempt = progress.attempt
            signal_ranks(self._folder, signal.SIGUSR2)

    def _stop(self, why: str) -> None:
        say(f"stopping after a step; {why}")
        self._stopping = True
