"""Calls back around each step of an optimizer, of whatever class, and around its closure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.recorder.guards import recorder_guard


class OptimizerSteps:
    """Calls back around each outermost step of an optimizer: a wrapper calls the optimizer that it wraps.

    begin: before the first; take: where the gradients are whole, and again after each call of a closure; around_call:
    before and after such a call; end: after the step. only: whose steps count; None: every optimizer's.
    """

    def __init__(
        self,
        *,
        begin: Callable[[], None],
        take: Callable[[], None],
        around_call: Callable[[Callable[[], Any]], Any],
        end: Callable[[Optimizer], None],
    ) -> None:
        self._begin, self._take, self._around_call, self._end = begin, take, around_call, end
        self.only: Optimizer | None = None
        self.depth = 0  # how many steps are inside of each other
        self._hooks: list[Any] = []

    def attach(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(recorder_guard.hook(self._before)),
            register_optimizer_step_post_hook(recorder_guard.hook(self.after)),
        ]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.only = [], None

    def _counts(self, optimizer: Optimizer) -> bool:
        return bool(self._hooks) and (self.only is None or optimizer is self.only)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._counts(optimizer):
            return None
        self.depth += 1
        if self.depth == 1:
            self._begin()
        closure = kwargs.get("closure")
        if closure is None:
            closure = next((value for value in args[1:] if callable(value)), None)
        if closure is None:
            self._take()
            return None

        def wrapped(*a: Any, **k: Any) -> Any:
            return recorder_guard.call(self._around_call, functools.partial(closure, *a, **k))

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return tuple(wrapped if value is closure else value for value in args), kwargs

    def after(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if self._counts(optimizer):
            self.depth -= 1
            if not self.depth:
                self._end(optimizer)
