"""Gives the phases of a job their turns: while one trains, the others' parameters require no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from samestep.job import Phase
from samestep.job.phases import parameters_of


class Turns:
    """The phases' parameters. After `take`, and until the next, gradients and the optimizer's step are one phase's.

    Not only during the forward pass: activation checkpointing repeats it in the backward pass.
    """

    def __init__(self, phases: Sequence[Phase], model: nn.Module) -> None:
        self._parameters = parameters_of(phases, model) if phases else []
        self._phase: int | None = None

    def take(self, phase: int) -> None:
        """Begins the turn of a phase, if it is not its own already."""
        if phase != self._phase:
            self._phase = phase
            for number, parameters in enumerate(self._parameters):
                for parameter in parameters:
                    parameter.requires_grad_(number == phase)

    def end(self) -> None:
        """Lets all parameters require a gradient again."""
        self._phase = None
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.requires_grad_(True)
