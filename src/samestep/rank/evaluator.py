"""Evaluator: what a Run calls between two steps to evaluate the training. BestWeights is one, the proof has another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from samestep.rank.weights import StateDict


class Evaluator(Protocol):
    """Evaluates a training between two epochs."""

    def begin(self, state: Callable[[], StateDict]) -> None: ...

    def is_due(self, done: int, steps_per_epoch: int) -> bool: ...

    def evaluate(self, done: int) -> bool: ...

    def means(self) -> Mapping[str, float]: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def files(self) -> list[Path]: ...
