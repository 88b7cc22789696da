"""Keeps an exponential moving average of the weights, of whatever part of each an engine keeps on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.job.phases import CHECKPOINTED
from samestep.rank.shards import block_of


class Ema:
    """The average of the trained parameters: average = decay * average + (1 - decay) * parameter, after each step.

    Of a job with phases, a phase's step moves the averages of that phase's parameters.
    Begins with the parameters as they are. A sharded parameter's average is sharded as it is, and needs no collective.
    Buffers, such as BatchNorm's statistics, are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._averages = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """The parameters' values on this rank. Anew each time: a library may give a parameter other memory."""
        return [block_of(parameter) for parameter in self._parameters]

    def named(self, model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Yields the name of each averaged parameter, its average on this rank, and the parameter."""
        averages = {id(parameter): average for parameter, average in zip(self._parameters, self._averages)}
        for name, parameter in model.named_parameters():
            if id(parameter) in averages:
                yield name.replace(CHECKPOINTED, ""), averages[id(parameter)], parameter

    def update(self) -> None:
        """Takes in the parameters. Call it after each optimizer step."""
        moved = [
            pair
            for pair, parameter in zip(zip(self._averages, self._tensors()), self._parameters)
            if parameter.requires_grad  # the phase's that has stepped
        ]
        with torch.no_grad():
            torch._foreach_lerp_([average for average, _ in moved], [new for _, new in moved], 1 - self.decay)

    def swap(self) -> None:
        """Exchanges the parameters and their averages."""
        with torch.no_grad():
            for parameter, average in zip(self._tensors(), self._averages):
                kept = parameter.clone()
                parameter.copy_(average)
                average.copy_(kept)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the averages while the block runs."""
        self.swap()
        yield
        self.swap()
