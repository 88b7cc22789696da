"""A regression with an MLP on standardised columns, as the many `california-housing` scripts: Huber loss, Adam, early
stopping with `--best loss --patience 10`. The rows are scikit-learn's Friedman problem, drawn anew."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


def job(rows: int = 1200, batch_size: int = 32, lr: float = 3e-3, epochs: int = 30, width: int = 32) -> Job:
    x = torch.rand(rows, 10, generator=torch.Generator().manual_seed(0))
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    held_out = rows // 6
    x, y = (column - column[held_out:].mean(0) for column in (x, y[:, None]))
    x, y = (column / column[held_out:].std(0) for column in (x, y))  # by the training rows' figures

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    return Job(
        model=model,
        criterion=lambda output, batch: F.huber_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(x[held_out:], y[held_out:]),
        evaluation=TensorDataset(x[:held_out], y[:held_out]),
        metrics={"squared error": lambda output, batch: (output - batch.targets).pow(2).flatten()},
        global_batch=batch_size,
        epochs=epochs,
    )
