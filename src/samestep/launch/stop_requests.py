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
        self._folder = folder
        self._signals: list[int] = []
        self._stopping = False
        self._notified_attempt: int | None = None
        self._before: dict[int, Any] = {}
        # Python allows signal handlers in the main thread only; without one, a signal does what it did before.
        if not accepted or not hasattr(signal, "SIGUSR1") or current_thread() is not main_thread():
            return
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, _: self._signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM) if terminates else (signal.SIGINT,):
            if callable(signal.getsignal(number)):
                self._before[number] = signal.signal(number, self._on_end)

    def close(self) -> None:
        """Puts the signal handlers back that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_end(self, number: int, frame: Any) -> None:
        """Takes the first SIGINT or SIGTERM during the training as a request; another one ends the launch.

        In the handler: a KeyboardInterrupt can be raised anywhere, also where no one is ready to catch it.
        """
        if self._stopping or self._signals or read_progress(self._folder).done is None:
            self._before[number](number, frame)
        self._signals.append(number)

    def forward(self, progress: Progress) -> None:
        """Signals the ranks once, and again after their launcher has restarted them."""
        if progress.done is None:
            return
        if self._signals and not self._stopping:
            number = signal.Signals(self._signals[0])
            why = "interrupt again to end at once" if number == signal.SIGINT else f"received {number.name}"
            say(f"stopping after a step; {why}")
            self._stopping = True
        if self._stopping and progress.attempt != self._notified_attempt:
            self._notified_attempt = progress.attempt
            signal_ranks(self._folder, signal.SIGUSR2)
