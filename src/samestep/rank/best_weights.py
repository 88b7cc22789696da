"""Evaluates a training between its epochs, keeps the weights that are best, and ends it early (patience)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.job import Job
from samestep.rank.evaluate import evaluate, plain_model
from samestep.rank.weights import save
from samestep.records.record import EvaluationSeen
from samestep.world import World


@dataclass
class BestWeights:
    """Evaluates one training between its epochs.

    every: epochs from one evaluation to the next; 0: none but the last. best: (metric, 'min' or 'max') by which the
    best weights are kept in the file `weights`; None keeps the last. patience: evaluations without a better one after
    which the training ends; None: never.
    """

    job: Job
    world: World
    steps: int
    weights: Path
    every: int = 1
    best: tuple[str, str] | None = None
    patience: int | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    best_at: int = -1  # the place of the best evaluation in the curve
    ended: bool = False  # whether patience has ended the training
    evaluated: EvaluationSeen | None = None  # the latest evaluation's part of the record

    def begin(self, state: Callable[[], dict[str, Any]]) -> None:
        """state: gives the training's whole state dict on rank 0; every rank must call it."""
        self._state = state

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        """Whether to look after `done` steps. The last evaluation is not this one's: it follows the training."""
        return bool(self.every) and done < self.steps and done % (self.every * steps_per_epoch) == 0

    def look(self, done: int) -> bool:
        """Evaluates; every rank must call it after the same step. Returns whether the training is to end."""
        self.add(done, self._state())  # which draws random numbers, but each micro-batch has a stream of its own
        self.ended = self.patience is not None and len(self.curve) - 1 - self.best_at >= self.patience
        return self.ended

    def add(self, done: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Evaluates rank 0's `state` after `done` steps, and keeps it if it is the best, or the last and none is
        sought."""
        entry: dict[str, float] = {"step": done}
        writes = self.world.rank == 0
        if writes and last and (self.best is None or not self.curve):
            save(state, self.weights)  # first, because an evaluation that fails must not cost the training
        if self.job.evaluation is not None:
            found = evaluate(self.job, plain_model(self.job, state, self.world), self.world)
            entry |= found.means()
            self.evaluated = found.record()
        better = not self.curve or self.best is None or _better(entry, self.curve[self.best_at], *self.best)
        self.curve.append(entry)
        if better:
            self.best_at = len(self.curve) - 1
            if writes and self.best is not None:
                save(state, self.weights)


def _better(new: Mapping[str, float], old: Mapping[str, float], name: str, way: str) -> bool:
    if math.isnan(old[name]):
        return not math.isnan(new[name])
    return bool(new[name] > old[name] if way == "max" else new[name] < old[name])
