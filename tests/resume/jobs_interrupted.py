"""A job that keeps a state where no checkpoint looks, the same job without it, and a slow one."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

X = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Hidden(nn.Module):
    """Its output depends on how often it was trained, which an attribute counts."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.counts, self.count = counts, torch.zeros(1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.counts:
            self.count = self.count + 1
        output: Tensor = self.second(torch.tanh(self.first(inputs))) * (1 + 0.1 * self.count.to(inputs))
        return output


def _job(counts: bool) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Hidden(counts)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=TensorDataset(X, Y),
        global_batch=10,
        epochs=2,
    )


def hidden() -> Job:
    return _job(True)


def plain() -> Job:
    return _job(False)


def slow(step_s: float = 0.02, epochs: int = 80) -> Job:
    """A step takes a moment, so that there is time to kill it: Adam, dropout, 5 steps an epoch."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 2))

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        time.sleep(step_s)
        return F.cross_entropy(output, batch.targets)

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.AdamW, {"lr": 0.01}),
        train=TensorDataset(X, Y),
        global_batch=10,
        epochs=epochs,
    )
