"""Jobs whose training is interrupted and continued."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long()
OPTIMIZERS = {
    "adam": Recipe(torch.optim.AdamW, {"lr": 0.01}),
    "sgd": Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


class Tied(nn.Module):
    """Two layers that share a weight, and a frozen one. Its rows do not depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.output = nn.Linear(6, 2)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.frozen(inputs)))
        output: Tensor = self.output(torch.tanh(self.second(hidden)))
        return output


class Stateful(nn.Module):
    """BatchNorm, dropout, and a buffer of each replica that the training reads, and that no state dict has."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.input, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.output = nn.Linear(8, 2)
        self.register_buffer("centre", torch.zeros(8), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.input(inputs))
        if self.training:
            self.centre.lerp_(hidden.detach().mean(0).to(self.centre), 0.1)  # autocast may have made it bfloat16
        output: Tensor = self.output(self.drop(torch.tanh(hidden - self.centre)))
        return output


def noisy(sample: tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, ...]:
    return sample[0] + 0.1 * torch.randn(6, generator=generator, dtype=torch.float64), *sample[1:]


def _rises_and_falls(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, milestones=[4])


def _job(network: type[nn.Module], optimizer: str, scheduler: LRSchedule, ema: float | None) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network().double()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=OPTIMIZERS[optimizer],
        train=TensorDataset(X[:44], Y[:44]),
        evaluation=TensorDataset(X[44:], Y[44:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=16,
        micro_batch=4,
        epochs=4,
        augment=noisy,
        scheduler=scheduler,
        ema=ema,
    )


def alike(optimizer: Literal["adam", "sgd"] = "adam") -> Job:
    """The same on any number of ranks: twelve steps, a rate that rises and falls, averaged weights, accumulation."""
    return _job(Tied, optimizer, LRSchedule(_rises_and_falls), 0.8)


def narrow(optimizer: Literal["adam", "sgd"] = "adam") -> Job:
    """The same in float32, without averages, which DeepSpeed's stage 3 does not keep, and without shared weights."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))

    def in_float32(sample: tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, ...]:
        return tuple(each.float() if each.is_floating_point() else each for each in noisy(sample, generator))

    rows = TensorDataset(X[44:].float(), Y[44:])
    return replace(alike(optimizer), model=model, ema=None, augment=in_float32, evaluation=rows)


def stateful(optimizer: Literal["adam", "sgd"] = "sgd") -> Job:
    """A rate that evaluations move, and what a replica keeps from step to step."""
    plateau = LRSchedule(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5), every="evaluation")
    return _job(Stateful, optimizer, plateau, None)


def lbfgs() -> Job:
    """One parameter, a matrix: LBFGS keeps vectors of as many values, which must not be taken for its."""
    quasi_newton = Recipe(torch.optim.LBFGS, {"lr": 0.2, "max_iter": 3, "history_size": 4})
    job = _job(nn.Module, "sgd", LRSchedule(_rises_and_falls), None)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 2, bias=False).double()

    return replace(job, model=model, optimizer=quasi_newton, epochs=2)
