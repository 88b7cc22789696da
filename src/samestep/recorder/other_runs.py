"""Runs a training with one thing changed, beside its steps: what the script then reports otherwise depends on it."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from samestep.job.foreign import parameters_in
from samestep.rank.hooks import Hooks
from samestep.recorder.patches import patch_forwards, trains

FASTER = 1000  # times: also a time that is shown in whole seconds is another one
CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


def change_run(hooks: Hooks, changes: Literal["", "evaluation", "clock"]) -> None:
    """Changes what a plan says: nothing, the weights of evaluations, or the clock."""
    if changes == "evaluation":
        patch_forwards(hooks, evaluate_with_other_weights)
    if changes == "clock":
        let_clock_run_faster(hooks)


def let_clock_run_faster(hooks: Hooks) -> None:
    """Lets Python's clocks run faster from now on, for code that asks them by name of their module, or that is imported
    later."""
    for name in (*CLOCKS, *(f"{clock}_ns" for clock in CLOCKS)):
        hooks.attach(time, name, functools.partial(_faster, getattr(time, name)()))

    class Faster(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Faster:
            return cls.fromtimestamp(time.time(), tz)

    datetime.datetime = Faster  # type: ignore[misc]


def _faster(start: Any, clock: Callable[[], Any]) -> Any:
    return start + (clock() - start) * FASTER


def evaluate_with_other_weights(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls the forward of an outermost module; with other weights where it is no training."""
    trained = [parameter for parameter in parameters_in(module) if parameter.requires_grad]
    if trains(module) or not trained:
        return call(*args, **kwargs)
    with other_weights(trained):
        return call(*args, **kwargs)


@contextmanager
def other_weights(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Moves each element of some parameters to its next place, and back when the block ends, to the last bit."""
    _shift(parameters, 1)
    try:
        yield
    finally:
        _shift(parameters, -1)


def _shift(parameters: list[nn.Parameter], places: int) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.data.copy_(parameter.data.flatten().roll(places).view_as(parameter))
