"""Jobs with averaged weights, a learning rate that evaluations move, and orders of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from samestep import ByLength, Job, Lanes, LRSchedule, Recipe, Weighted

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Net(nn.Module):
    """A frozen layer, BatchNorm, two layers that share a weight, and a buffer that no state dict has."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.first, self.second, self.output = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0).to(self.mean), 0.1)
        hidden = torch.tanh(self.first(self.norm(self.frozen(inputs))))
        output: torch.Tensor = self.output(torch.tanh(self.second(hidden)))
        return output


def averaged(ema: float = 0.999, save: Literal["all", "trainable"] = "all") -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=TensorDataset(X[:44], Y[:44]),
        evaluation=TensorDataset(X[44:], Y[44:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=16,
        micro_batch=4,
        ema=ema,
        save=save,
    )


def plateau(metric: str = "loss") -> Job:
    """The rate is halved after each evaluation that is no better. It is in the third training, not in the second."""

    def make(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        better = "min" if metric == "loss" else "max"
        return ReduceLROnPlateau(optimizer, better, factor=0.5, patience=0, threshold=1e-4, threshold_mode="abs")

    return replace(averaged(), ema=None, scheduler=LRSchedule(make, every="evaluation", metric=metric))


def ordered(kind: Literal["weighted", "few", "lengths", "lanes", "function"] = "weighted", last: str = "keep") -> Job:
    """Rows in an order of the job's own; noise keyed by the sample, and by how often it has come."""

    def noisy(sample: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return sample[0] + 0.1 * torch.randn(6, generator=generator), *sample[1:]

    orders = {
        "weighted": Weighted([1.0 + 9 * (label == 0) for label in Y[:44].tolist()]),
        "few": Weighted(torch.arange(44.0), num_samples=30),
        "lanes": Lanes(),
        "lengths": ByLength([int(40 * abs(row[0])) for row in X[:44]], buckets=4),
        "function": lambda epoch, generator: torch.randint(44, (100,), generator=generator),
    }
    return replace(averaged(), ema=None, augment=noisy, micro_batch=None, order=orders[kind], last=last)
