"""Regression of rows with a rate that falls with each step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe


def job() -> Job:
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 1)

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.05}),
        scheduler=LRSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)),
        train=TensorDataset(rows, rows.sum(1, keepdim=True)),
        global_batch=8,
    )
