"""The reference's closure: every replica computes its gradients of the step again, at the weights as they then are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from samestep.reference.results import MicroBatch

Seen: TypeAlias = "list[tuple[int, MicroBatch]]"  # (replica, what it saw), of a step


class Closure:
    """What an optimizer such as LBFGS calls. Returns the step's loss, with the gradients at the same weights.

    loss: at the weights that the step begins with, whose gradients are there already: they serve the first call,
    if it comes before the weights move. evaluate: computes the gradients again, and returns the loss.
    """

    def __init__(self, parameters: list[nn.Parameter], loss: float, evaluate: Callable[[], float]) -> None:
        self.parameters, self.evaluate = parameters, evaluate
        self.first: float | None = loss
        self.begin = self._moves()

    def __call__(self) -> Any:
        first, self.first = self.first, None
        if first is not None and self._moves() == self.begin:
            return torch.tensor(first, dtype=torch.float64)
        with torch.enable_grad():
            return torch.tensor(self.evaluate(), dtype=torch.float64)

    def _moves(self) -> int:
        return sum(parameter._version for parameter in self.parameters)  # torch counts what is done in place


def mean_loss(micro_batches: Seen) -> float:
    """The mean loss over the rows of a step."""
    total = sum(micro_batch.weight for _, micro_batch in micro_batches)
    return sum(micro_batch.loss * micro_batch.weight for _, micro_batch in micro_batches) / total
