"""Meter: step times, waiting times and losses of one training, with no `.item()` and no collective between steps.

A step's time is the distance between two calls of `step`. On CUDA it is read from events after the run. Losses go
through a ring of pinned memory and are looked at half a ring later, when they have long arrived: a loss that is
not finite is noticed a few steps late, with its true step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.errors import UserError

HALF = 8


@dataclass
class Meter:
    """rank: named when a loss is not finite. device: where the losses are."""

    rank: int
    device: str
    losses: list[float] = field(default_factory=list)  # the mean over the rows of each micro-batch, in order
    wait_s: list[float] = field(default_factory=list)  # per step: how long the loop waited for its data
    fetch_s: float = 0.0  # of all batches: how long fetching them took, beside the training or in it
    fetch_cpu_s: float = 0.0  # of these: how long a processor worked
    step_of: list[int] = field(default_factory=list)  # the step of each micro-batch that `loss` was told of
    weight_of: list[float] = field(default_factory=list)  # and what its rows weigh

    def __post_init__(self) -> None:
        self._cuda = self.device != "cpu"
        self._ring = torch.zeros(2 * HALF, dtype=torch.float64, pin_memory=self._cuda)
        self._cells = list(self._ring)
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._stamps: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._pauses: set[int] = set()  # the stamps at which a pause ends
        self._told = 0
        self._waited = 0.0

    def loss(self, value: Tensor, step: int, weight: float) -> None:
        """Notes the loss of one micro-batch (a scalar on the device, the mean over rows that weigh `weight`)."""
        self._cells[self._told % (2 * HALF)].copy_(value, non_blocking=True)
        self.step_of.append(step)
        self.weight_of.append(weight)
        self._told += 1
        if self._told % HALF == 0:
            if self._cuda:
                self._arrived[self._told // HALF % 2].record()
            self._read(self._told - HALF)

    def waited(self, seconds: float, fetch_s: float | None = None, fetch_cpu_s: float = 0.0) -> None:
        """Notes time that the loop spent waiting for its next batch. fetch_s: what fetching it took elsewhere, None for
        not elsewhere. fetch_cpu_s: how long a processor worked for it."""
        self._waited += seconds
        self.fetch_s += seconds if fetch_s is None else fetch_s
        self.fetch_cpu_s += fetch_cpu_s

    def step(self) -> None:
        """Marks the end of a step."""
        self._stamp()
        self.wait_s.append(self._waited)
        self._waited = 0.0

    def begin(self) -> None:
        """Marks the start of the first step."""
        self._stamp()
        self._waited = 0.0

    def resume(self) -> None:
        """Marks the end of a pause: what has passed since the last step belongs to none."""
        self._pauses.add(len(self._stamps))
        self._stamp()
        self._waited = 0.0

    def _stamp(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._stamps.append(time.perf_counter())

    def finish(self) -> list[float]:
        """Reads what is left. Returns the seconds of every step."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._read(self._told)
        if self._cuda:
            times = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:])]
        else:
            times = [b - a for a, b in zip(self._stamps, self._stamps[1:])]
        return [seconds for number, seconds in enumerate(times, 1) if number not in self._pauses]

    def _read(self, until: int) -> None:
        """Reads the losses told before number `until`. They were written half a ring ago."""
        if until <= len(self.losses):
            return
        if self._cuda:
            self._arrived[until // HALF % 2].synchronize()
        start = len(self.losses)
        values = self._ring.tolist()
        self.losses += [values[i % (2 * HALF)] for i in range(start, until)]
        for number in range(start, until):
            if not math.isfinite(self.losses[number]):
                raise UserError(
                    f"the loss is not finite at step {self.step_of[number]} on rank {self.rank}: "
                    f"{self.losses[number]}; lower the learning rate (--set lr=…) or look at the data of that step"
                )
