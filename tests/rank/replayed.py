"""A job for spot checks: dropout, BatchNorm, schedules, accumulation, clipping, weights and averages, as asked for; and
faults that act late, on one rank."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import TensorDataset

from samestep import Batch, Job, LRSchedule, Recipe

Fault = Literal["none", "gradient", "bit", "weight", "data"]


class Net(nn.Module):
    def __init__(self, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(torch.relu(self.norm(self.first(rows)))))
        return output


def flipped(gradient: Tensor) -> Tensor:
    """Returns the gradient with one bit of its first value flipped: the highest of the exponent's but one."""
    changed = gradient.clone()
    bits = changed.view(-1)[:1].view(torch.int32)
    bits ^= 1 << 26
    return changed


def job(
    fault: Fault = "none",
    at: int = 5,
    on: int = 1,
    norm: bool = False,
    dropout: float = 0.0,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    schedule: Literal["none", "step", "epoch"] = "none",
    accumulate: int = 0,
    clip: float = 0.0,
    ema: float = 0.0,
    weighted: bool = False,
    epochs: int = 3,
    rows: int = 54,
    augmented: bool = False,
) -> Job:
    """fault: acts on rank `on` in step `at`."""
    data = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    targets = data[:, :3].argmax(1)
    now = {"step": -1}

    def acts() -> bool:
        return fault != "none" and now["step"] == at and os.environ.get("RANK") == str(on)

    def model() -> nn.Module:
        torch.manual_seed(0)
        network = Net(norm, dropout)
        if fault in ("bit", "gradient"):
            network.last.weight.register_hook(
                lambda gradient: None if not acts() else flipped(gradient) if fault == "bit" else gradient * 1.01
            )
        return network

    def forward(network: nn.Module, batch: Batch) -> Any:
        if network.training:
            now["step"] = batch.micro_batch.step
            if fault == "weight" and acts():
                with torch.no_grad():
                    next(p for name, p in network.named_parameters() if name.endswith("last.weight"))[0, 0] += 1e-3
        return network(batch.inputs + 0.01 if fault == "data" and acts() else batch.inputs)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output, batch.targets, reduction="none")
        if not weighted:
            return losses.mean()
        weights = 1.0 + batch.targets
        return (losses * weights).sum() / weights.sum()

    schedules = {
        "step": LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 40)),
        "epoch": LRSchedule(lambda optimizer: StepLR(optimizer, 1, 0.5), every="epoch"),
    }
    return Job(
        model=model,
        forward=forward,
        criterion=criterion,
        optimizer=Recipe(torch.optim.AdamW, {"lr": 0.01})
        if optimizer == "adamw"
        else Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=TensorDataset(data, targets),
        global_batch=8,
        micro_batch=accumulate or None,
        scheduler=schedules.get(schedule),
        clip_norm=clip or None,
        ema=ema or None,
        weight=(lambda index: 1.0 + float(targets[index])) if weighted else None,
        augment=(lambda sample, generator: (sample[0] + torch.randn(6, generator=generator) / 10, sample[1]))
        if augmented
        else None,
        epochs=epochs,
    )
