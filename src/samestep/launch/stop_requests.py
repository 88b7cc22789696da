"""Handles requests to stop a training after a step: Ctrl-C, SIGTERM, a terminal that has gone (SIGHUP), or what a
scheduler sends before its limit (SIGUSR1, SIGUSR2, SIGXCPU)."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from samestep.errors import say
from samestep.launch.end import signal_ranks
from samestep.records.record import Progress, read_progress

SCHEDULERS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")  # before the training they wait until it has begun
REPEATED = (*SCHEDULERS, "SIGHUP")  # a second one asks for nothing more: both shell and kernel tell of a lost terminal
REQUESTS = ("SIGINT", "SIGTERM", *REPEATED)


class StopRequests:
    """Forwards a request to the ranks of `folder`, once they train.

    accepted: False: an interrupt ends the launch. ends_by: the signals that end it too. An outer launcher sends SIGTERM
    to its ranks when one of them has failed, and none of them can train on.
    """

    def __init__(self, folder: Path, *, accepted: bool, ends_by: Collection[signal.Signals] = ()) -> None:
        self._folder = folder
        self._signals: list[int] = []
        self._stopping = False
        self._notified_attempt: int | None = None
        self._before: dict[int, Any] = {}
        # Python allows signal handlers in the main thread only; without one, a signal does what it did before.
        if not accepted or current_thread() is not main_thread():
            return
        for number in (getattr(signal, name) for name in REQUESTS if hasattr(signal, name)):
            ignored = signal.getsignal(number) in (signal.SIG_IGN, None) and number.name not in SCHEDULERS
            if number not in ends_by and not ignored:  # as under nohup, and Ctrl-C in a shell's background
                self._before[number] = signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Puts the signal handlers back that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Takes a signal during the training as a request; Ctrl-C or SIGTERM once more ends the launch.

        Once more: after the sentence that says so, because `timeout` sends its signal twice at once. In the handler: a
        KeyboardInterrupt can be raised anywhere, also where no one is ready to catch it.
        """
        name = signal.Signals(number).name
        ending = [each for each in self._signals if signal.Signals(each).name not in REPEATED]
        once_more = name not in REPEATED and ending and (self._stopping or len(ending) > 1)
        if once_more or (name not in SCHEDULERS and read_progress(self._folder).done is None):
            self._end(number, frame)
        self._signals.append(number)

    def _end(self, number: int, frame: Any) -> None:
        """Does what the signal did before."""
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

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
