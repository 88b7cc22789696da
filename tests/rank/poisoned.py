"""A job with one row that makes the loss, or only a gradient, NaN. In float64."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from samestep import Batch, Job, LRSchedule, Recipe

ROW = 29


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(rows[:, :6])))
        # Where the last feature is 0 the gradient of `scale` is NaN: infinity times 0. The output is finite.
        scaled: Tensor = self.last(hidden) * (rows[:, 6:] * self.scale).square().sum(1, keepdim=True).sqrt()
        return scaled


def job(
    poison: Literal["none", "loss", "gradient", "all"] = "none",
    norm: bool = False,
    ema: bool = False,
    last: bool = False,
    drifts: int = -1,
) -> Job:
    """last: only the last step of the training has the poisoned row. drifts: the step after which rank 1's weights
    change."""
    rows = torch.randn(48, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:, 6] = 1
    if poison == "loss":
        rows[ROW, 0] = torch.nan
    if poison == "all":
        rows[:, 0] = torch.nan
    if poison == "gradient":
        rows[ROW, 6] = 0

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Net(norm).double()

    def forward(network: nn.Module, batch: Batch) -> Any:
        if network.training and batch.micro_batch.step == drifts + 1 and drifts >= 0 and os.environ.get("RANK") == "1":
            with torch.no_grad():
                next(p for name, p in network.named_parameters() if name.endswith("last.weight"))[0, 0] += 1e-9
        return network(batch.inputs)

    def order(epoch: int, generator: torch.Generator) -> list[int]:
        indices: list[int] = torch.randperm(48, generator=generator).tolist()
        if last:
            indices.remove(ROW)
            indices = [*indices[:47], ROW] if epoch else [*indices, indices[0]]
        return indices

    return Job(
        model=model,
        forward=forward,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step)),
        train=TensorDataset(rows, torch.arange(48) % 3),
        order=order if last else None,
        ema=0.9 if ema else None,
        global_batch=16,
        epochs=40 if poison == "all" else 2,
    )
