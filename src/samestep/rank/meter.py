"""Meter: records the step times, data waits and losses of one training without a `.item()` or a collective per step.

A step's time is the time between two calls of `step`; on CUDA it is read from events after the run. Losses are copied
to a ring buffer in pinned memory and read half a ring later, when the copies are done. A loss that is not finite is
therefore reported a few steps late, with its true step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.errors import NotFinite
from samestep.message import message
from samestep.rank import hardware

HALF = 8


@dataclass
class Meter:
    """Records one training. rank: for the error about a loss that is not finite. device: where the losses are."""

    rank: int
    device: str
    losses: list[float] = field(default_factory=list)  # the mean over the rows of each micro-batch, in order
    wait_s: list[float] = field(default_factory=list)  # of each step: seconds that the loop waited for data
    busy_s: list[float] = field(default_factory=list)  # of each step: CPU seconds of this thread, without loading
    fetch_s: float = 0.0  # seconds that loading all batches took, in a worker or in the training loop
    fetch_cpu_s: float = 0.0  # CPU seconds of that
    step_of: list[int] = field(default_factory=list)  # the step of each micro-batch in `losses`
    weight_of: list[float] = field(default_factory=list)  # the weight of its rows in the mean

    def __post_init__(self) -> None:
        self._cuda = self.device != "cpu"
        self._ring = torch.zeros(2 * HALF, dtype=torch.float64, pin_memory=self._cuda)
        self._cells = list(self._ring)
        self._copied = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._stamps: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._pauses: set[int] = set()  # the stamps at which a pause ends
        self._count = self._checked = 0
        self.not_finite: Callable[[int, int, float], None] = self._raise  # called with (step, micro-batch, loss)
        self._waited = self._loading_cpu = self._cpu = 0.0

    def loss(self, value: Tensor, step: int, weight: float) -> None:
        """Records the loss of one micro-batch: a scalar on the device, the mean over rows of total weight `weight`."""
        self._cells[self._count % (2 * HALF)].copy_(value, non_blocking=True)
        self.step_of.append(step)
        self.weight_of.append(weight)
        self._count += 1
        if self._count % HALF == 0:
            if self._cuda:
                self._copied[self._count // HALF % 2].record()
            self._read(self._count - HALF)

    def check_losses(self) -> None:
        """Checks the losses since the last call. On a GPU they are checked later, when they have been copied."""
        if not self._cuda:
            for number in range(max(self._checked, self._count - 2 * HALF), self._count):
                self._check(number, float(self._cells[number % (2 * HALF)]))
            self._checked = self._count

    def recent_loss(self) -> float:
        """Returns a recent loss: on a CPU the latest one. On a GPU only the first losses are waited for."""
        if self._cuda and self.losses:
            return self.losses[-1]
        if self._cuda:
            torch.cuda.synchronize(self.device)
        return float(self._cells[(self._count - 1) % (2 * HALF)])

    def waited(self, seconds: float, fetch_s: float | None = None, fetch_cpu_s: float = 0.0) -> None:
        """Records the seconds that the loop waited for its next batch.

        fetch_s: seconds that loading it took in a worker; None: it was loaded while the loop waited.
        fetch_cpu_s: CPU seconds of loading it.
        """
        self._waited += seconds
        self.fetch_s += seconds if fetch_s is None else fetch_s
        self.fetch_cpu_s += fetch_cpu_s
        self._loading_cpu += fetch_cpu_s if fetch_s is None else 0.0

    def step(self) -> None:
        """Marks the end of a step."""
        self._stamp()
        self.wait_s.append(self._waited)
        self.busy_s.append(max(0.0, time.thread_time() - self._cpu - self._loading_cpu))
        self._start_step()

    def begin(self) -> None:
        """Marks the start of the first step."""
        self._stamp()
        self._start_step()

    def resume(self) -> None:
        """Marks the end of a pause: the time since the last step counts for no step."""
        self._pauses.add(len(self._stamps))
        self._stamp()
        self._start_step()

    def _start_step(self) -> None:
        self._waited = self._loading_cpu = 0.0
        self._cpu = time.thread_time()

    def _stamp(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._stamps.append(time.perf_counter())

    def flush(self) -> None:
        """Waits for the device and reads the remaining losses. Raises NotFinite when a loss is not finite."""
        hardware.synchronize(self.device)
        self._read(self._count)

    def finish(self) -> list[float]:
        """Reads the remaining losses. Returns the seconds of every step.

        Raises NotFinite when a loss is not finite.
        """
        self.flush()
        if self._cuda:
            times = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:])]
        else:
            times = [b - a for a, b in zip(self._stamps, self._stamps[1:])]
        return [seconds for number, seconds in enumerate(times, 1) if number not in self._pauses]

    def _read(self, until: int) -> None:
        """Reads the losses before number `until`, which were copied half a ring ago."""
        if until <= len(self.losses):
            return
        if self._cuda:
            self._copied[until // HALF % 2].synchronize()
        start = len(self.losses)
        values = self._ring.tolist()
        self.losses += [values[i % (2 * HALF)] for i in range(start, until)]
        for number in range(start, until):
            self._check(number, self.losses[number])

    def _check(self, number: int, loss: float) -> None:
        if not math.isfinite(loss):
            step = self.step_of[number]
            self.not_finite(step, number - self.step_of.index(step), loss)

    def _raise(self, step: int, micro: int, loss: float) -> None:
        raise NotFinite(message("loss_not_finite_at_step", step=step, rank=self.rank, loss=str(loss)))
