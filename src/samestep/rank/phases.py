"""Lets the parameters of one phase of a job require a gradient, and those of its other phases none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from samestep.job import Phase
from samestep.job.phases import parameters_of


class ActivePhase:
    """The phase whose parameters require a gradient, so that backward and the optimizer's step are this phase's alone.

    Not only during the forward pass: activation checkpointing repeats it in the backward pass.
    """

    def __init__(self, phases: Sequence[Phase], model: nn.Module) -> None:
        self._parameters = parameters_of(phases, model) if phases else []
        self._phase: int | None = None

    def activate(self, phase: int) -> None:
        """Lets only this phase's parameters require a gradient."""
        if phase != self._phase:
            self._phase = phase
            for number, parameters in enumerate(self._parameters):
                for parameter in parameters:
                    parameter.requires_grad_(number == phase)

    def end(self) -> None:
        """Lets all phases' parameters require a gradient again."""
        self._phase = None
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.requires_grad_(True)
