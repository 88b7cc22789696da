"""A binary classifier with `BCELoss` on a sigmoid, as countless tutorials on breast-cancer or churn tables have it."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


def job(rows: int = 600, batch_size: int = 32, lr: float = 1e-2, epochs: int = 10) -> Job:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 12, generator=draw)
    y = (x[:, :3].sum(1) + 0.5 * torch.randn(rows, generator=draw) > 0).float()
    held_out = rows // 6

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))

    return Job(
        model=model,
        criterion=lambda output, batch: F.binary_cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(x[held_out:], y[held_out:]),
        evaluation=TensorDataset(x[:held_out], y[:held_out]),
        metrics={"accuracy": lambda output, batch: (output > 0.5) == (batch.targets > 0.5)},
        global_batch=batch_size,
        epochs=epochs,
    )
