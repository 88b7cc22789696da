"""Closure: computes a step's loss and gradients as often as an optimizer such as LBFGS asks for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.job import Batch
from samestep.world import World


class Closure:
    """The micro-batches of the current step, and the mean loss over its rows on all ranks.

    again: whether they are being computed again. Then nothing is recorded of them.
    """

    def __init__(self, world: World) -> None:
        self.again = False
        self._world = world
        self._batches: list[Batch] = []
        self._loss = torch.zeros((), device=world.device)

    def add(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the mean loss over the rows of one of the step's micro-batches."""
        if batch.micro_batch.micro == 0:
            self._loss = torch.zeros_like(self._loss, dtype=torch.float64)
            if not self.again:
                self._batches = []
        self._loss += loss.detach() * batch.micro_batch.share
        if not self.again:
            self._batches.append(batch)

    def of_step(self, model: nn.Module, backward: Callable[[Batch], Tensor]) -> Callable[[], Tensor]:
        """Returns the function that the optimizer calls. backward: computes a micro-batch's gradients.

        It sets the gradients and returns the mean loss over the step's rows on all ranks, so that all of them take
        the same branch of a line search. The first call finds the gradients that the loop has computed, unless the
        optimizer has moved the parameters before it.
        """
        computed_at: list[int] | None = _versions(model)

        def closure() -> Tensor:
            nonlocal computed_at
            if computed_at != _versions(model):
                self._compute_again(model, backward)
            computed_at = None
            if self._world.size > 1:
                dist.all_reduce(self._loss)
                self._loss /= self._world.size
            return self._loss.clone()

        return closure

    def _compute_again(self, model: nn.Module, backward: Callable[[Batch], Tensor]) -> None:
        self.again = True
        model.zero_grad()
        with torch.enable_grad():
            for batch in self._batches:
                backward(batch)
        self.again = False


def _versions(model: nn.Module) -> list[int]:
    """Returns a count of each parameter's changes in place."""
    return [parameter._version for parameter in model.parameters()]
