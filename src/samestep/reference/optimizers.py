"""The reference's optimizers: each phase has its own, which trains its own parameters, and may call a closure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.job import Job, Phase, Recipe

Gradient = list[Tensor | None]  # of each trained parameter, in the model's order


@dataclass(frozen=True)
class PlayedPhase:
    """One phase, or the whole step of a job without phases.

    job: with the phase's criterion and forward. owns: whether the phase trains each of the trained parameters.
    """

    number: int
    job: Job
    owns: list[bool]
    optimizer: torch.optim.Optimizer

    def owned(self, gradient: Sequence[Tensor | None]) -> Gradient:
        """The gradient of the phase's parameters, None for the others."""
        return [g if owned else None for g, owned in zip(gradient, self.owns, strict=True)]


def phases_of(job: Job, model: nn.Module) -> list[PlayedPhase]:
    """The phases in their order."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not job.phases:
        return [PlayedPhase(0, job, [True] * len(trained), _built(job.optimizer, model, list(model.parameters())))]
    phases = []
    for number, phase in enumerate(job.phases):
        plain = replace(
            job,
            phases=(),
            criterion=phase.criterion,
            forward=phase.forward or job.forward,
            optimizer=phase.optimizer,
        )
        ids = _ids(phase, model)
        owns = [id(p) in ids for p in trained]
        parameters = [p for p, owned in zip(trained, owns) if owned]
        phases.append(PlayedPhase(number, plain, owns, _built(phase.optimizer, model, parameters)))
    return phases


def _built(recipe: Recipe, model: nn.Module, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The recipe's optimizer of its own groups, or of `parameters`; not by Recipe.build, which the engines call."""
    given: Any = parameters if recipe.groups is None else recipe.groups(model)
    return recipe.cls(given, **dict(recipe.settings))


def _ids(phase: Phase, model: nn.Module) -> set[int]:
    if callable(phase.parameters):
        return {id(p) for p in phase.parameters(model)}
    names = {phase.parameters} if isinstance(phase.parameters, str) else set(phase.parameters)
    ids = set()
    for full, parameter in model.named_parameters(remove_duplicate=False):
        path = full.replace("_checkpoint_wrapped_module.", "")  # of activation checkpointing
        while path and path not in names:
            path = path.rpartition(".")[0]
        if path:
            ids.add(id(parameter))
    return ids


def scheduled(phases: list[PlayedPhase]) -> torch.optim.Optimizer:
    """What a scheduler is made for: the optimizer, or one with the groups of all phases' optimizers."""
    if len(phases) == 1:
        return phases[0].optimizer
    return _Groups([group for phase in phases for group in phase.optimizer.param_groups], {})


class _Groups(torch.optim.Optimizer):
    """Holds parameter groups, the very dicts of other optimizers. Its step does nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


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
