"""Regression of rows with Adam."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


def job() -> Job:
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 1)

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": 0.05}),
        train=TensorDataset(rows, rows.sum(1, keepdim=True)),
        global_batch=8,
    )
