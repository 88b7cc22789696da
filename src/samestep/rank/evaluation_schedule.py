"""Steps a learning-rate scheduler after evaluations: LRSchedule(make, every="evaluation", metric=...)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from samestep.job import LRSchedule


class EvaluationSchedule:
    """The scheduler of `optimizer`, which evaluations step. Every rank has the same figures, and so the same rates."""

    def __init__(self, schedule: LRSchedule, optimizer: Optimizer) -> None:
        self.metric, self.scheduler = schedule.metric, schedule.make(optimizer)
        self.takes_metric = "metrics" in inspect.signature(self.scheduler.step).parameters

    def step(self, means: Mapping[str, float]) -> None:
        """Moves the learning rate after an evaluation."""
        step: Any = self.scheduler.step
        if self.takes_metric:
            step(means[self.metric])
        else:
            step()
