"""Calls listeners (Job.on_step, --log) after every step and evaluation, on rank 0. Their errors end no training."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from samestep.errors import say
from samestep.job import StepInfo
from samestep.rank.meter import Meter


class Listener(Protocol):
    """Is called after each step and evaluation. name: for the warning where it raises. resume: called first where the
    training continues after `step` steps: what was reported of later ones no longer counts."""

    name: str

    def resume(self, step: int) -> None: ...

    def step(self, info: StepInfo) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Pending:
    """A step whose loss is still on its way from the device."""

    step: int
    epoch: int
    rates: tuple[float, ...]
    seconds: float
    wait_s: float


class Watch:
    """Collects what a StepInfo holds, without a synchronisation: listeners are called once its loss has been read.

    rows_of: (steps) -> the rows of the first so many steps, over all ranks.
    """

    def __init__(self, listeners: Sequence[Listener], rows_of: Callable[[int], int]) -> None:
        self.listeners, self.rows_of = listeners, rows_of
        self._rates: tuple[float, ...] = ()
        self._pending: list[_Pending] = []
        self._read = 0  # losses of micro-batches that listeners have received
        self._began = time.perf_counter()
        self._warned: set[str] = set()

    def begin(self, optimizer: Optimizer, first: int = 0) -> None:
        """Registers the optimizer whose learning rates are reported, and starts the clock.

        first: the steps done before, where the training continues.
        """
        for listener in self.listeners if first else ():
            self._call(listener.name, listener.resume, first)
        # Read after the optimizer's step: later, the scheduler has moved the rate.
        optimizer.register_step_post_hook(lambda stepped, *_: self._read_rates(stepped))
        self._began = time.perf_counter()

    def _read_rates(self, optimizer: Optimizer) -> None:
        self._rates = tuple(float(group["lr"]) for group in optimizer.param_groups)

    def step(self, done: int, epoch: int, meter: Meter) -> None:
        """Notes the step that has just been taken, and reports those whose losses have been read."""
        now = time.perf_counter()
        self._pending.append(_Pending(done, epoch, self._rates, now - self._began, meter.wait_s[-1]))
        self._began = now
        self.report(meter)

    def pause(self, meter: Meter) -> None:
        """Reports all steps so far, before an evaluation."""
        meter.flush()
        self.report(meter)

    def report(self, meter: Meter) -> None:
        """Reports the steps whose losses have been read."""
        while self._pending:
            pending = self._pending[0]
            until = self._read
            while until < len(meter.step_of) and meter.step_of[until] < pending.step:
                until += 1
            if until > len(meter.losses):
                return
            weights, losses = meter.weight_of[self._read : until], meter.losses[self._read : until]
            total = sum(weights)
            loss = sum(w * x for w, x in zip(weights, losses)) / total if total else 0.0
            rows = self.rows_of(pending.step) - self.rows_of(pending.step - 1)
            info = StepInfo(pending.step, pending.epoch, loss, pending.rates, rows, pending.seconds, pending.wait_s)
            self._read = until
            del self._pending[0]
            for listener in self.listeners:
                self._call(listener.name, listener.step, info)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation after `step` steps. The time until now counts for no step."""
        for listener in self.listeners:
            self._call(listener.name, listener.evaluation, step, dict(metrics))
        self._began = time.perf_counter()

    def close(self) -> None:
        for listener in self.listeners:
            self._call(listener.name, listener.close)

    def _call(self, name: str, function: Callable[..., Any], *given: Any) -> None:
        try:
            function(*given)
        except Exception as error:
            if name not in self._warned:  # once: it may fail at every step
                self._warned.add(name)
                frame = traceback.extract_tb(error.__traceback__)[-1]
                what = (str(error).strip().splitlines() or [""])[0]
                at = f"{frame.filename}, line {frame.lineno}"
                say(f"{name} raised {type(error).__name__}: {what} ({at}); the training goes on")
