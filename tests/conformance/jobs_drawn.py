"""A job of many shapes, for tests that draw its settings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from samestep import Batch, Job, LRSchedule, Recipe


class Masked(nn.Module):
    """Buffers as models have them: a boolean mask, one of infinities, and a table with a missing value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(18, 3)
        self.register_buffer("keep", torch.tensor([True, True, False]))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
        self.register_buffer("table", torch.tensor([0.5, torch.nan]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs.flatten(1)).where(self.keep, self.mask.clamp(min=-9))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.output = nn.Linear(18, 18), nn.Linear(18, 18), nn.Linear(18, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.second(torch.tanh(self.first(inputs.flatten(1))))))


class Unused(nn.Module):
    """A layer that no forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(18, 3), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs.flatten(1))


class Read(IterableDataset[tuple[torch.Tensor, ...]]):
    """Rows from the beginning, the second epoch's from the end; shared out to loader workers, as torch's docs do it."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        worker = get_worker_info()
        for index in range(worker.id if worker else 0, len(self), worker.num_workers if worker else 1):
            yield self.rows[index if self.epoch % 2 == 0 else len(self) - 1 - index]


def _streamed(rows: TensorDataset) -> Dataset[Any]:
    # No statement, because a script that is ejected has no samestep to import from.
    stream: Dataset[Any] = importlib.import_module("samestep.data.stream").Stream(Read(rows))
    return stream


def _groups(model: nn.Module) -> list[dict[str, object]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    return [decayed, {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3}]


def _network(arch: str, width: int) -> nn.Module:
    if arch == "tied":
        return Tied()
    if arch == "unused":
        return Unused()
    if arch == "masked":
        return Masked()
    if arch == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(18, width), nn.Tanh(), nn.Linear(width, 3))
    if arch == "deep":
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(18, width), *hidden, nn.Dropout(0.4), nn.Linear(width, 3))
    norm = nn.BatchNorm2d(width) if arch == "batchnorm" else nn.GroupNorm(1, width)
    layers = [nn.Conv2d(2, width, 3, padding=1), norm, nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(9 * width, 3))


OPTIMIZERS = {
    "sgd": Recipe(torch.optim.SGD, {"lr": 0.1}),
    "momentum": Recipe(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "adamw": Recipe(torch.optim.AdamW, {"lr": 1e-3}),
    "groups": Recipe(torch.optim.AdamW, {"lr": 1e-3}, _groups),
    "adam": Recipe(torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "rmsprop": Recipe(torch.optim.RMSprop, {"lr": 1e-3}),
    "lbfgs": Recipe(torch.optim.LBFGS, {"lr": 0.3, "max_iter": 4, "line_search_fn": "strong_wolfe"}),
}


def job(
    arch: Literal["mlp", "deep", "conv", "batchnorm", "masked", "tied", "unused"] = "mlp",
    width: int = 4,
    rows: int = 20,
    global_batch: int = 8,
    seed: int = 0,
    optimizer: str = "momentum",
    micro_batch: int = 0,
    clip_norm: float = 0.0,
    every: Literal["step", "epoch", "never"] = "never",
    last: Literal["keep", "drop"] = "keep",
    weighted: bool = False,
    frozen: bool = False,
    float32_only: bool = False,
    stream: bool = False,
) -> Job:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 2, 3, 3, generator=generator)
    targets = torch.randint(3, (rows,), generator=generator)
    weights = 1 + torch.rand(rows, generator=generator, dtype=torch.float64)

    def model() -> nn.Module:
        torch.manual_seed(seed + 1)
        network = _network(arch, width)
        if frozen:
            next(network.parameters()).requires_grad_(False)
        return network

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        _, of_rows, labels = batch.data
        if float32_only:
            output = output @ torch.eye(3)
        losses = F.cross_entropy(output, labels, reduction="none")
        return (losses * of_rows).sum() / of_rows.sum() if weighted else losses.mean()

    data = TensorDataset(inputs, weights, targets)
    held_out = TensorDataset(*(tensor[: rows // 2 + 1] for tensor in data.tensors))
    weigh = (lambda index: float(weights[index])) if weighted else None
    return Job(
        model=model,
        criterion=criterion,
        forward=lambda network, batch: network(batch.data[0]),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=None if every == "never" else LRSchedule(lambda o: ExponentialLR(o, 0.8), every=every),
        train=_streamed(data) if stream else data,
        evaluation=_streamed(held_out) if stream else held_out,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.data[2]},
        global_batch=global_batch,
        seed=seed,
        micro_batch=micro_batch or None,
        clip_norm=clip_norm or None,
        weight=weigh,
        evaluation_weight=weigh,
        last=last,
        shuffle=not stream,
    )
