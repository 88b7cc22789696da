"""Jobs that ask which rank they are, one whose optimizer moves nothing, and one with a parameter of whole numbers."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

RANKS = int(os.environ.get("WORLD_SIZE", 1))


class Codes(nn.Module):
    """A layer beside frozen codes of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(18, dtype=torch.int8).view(6, 3) - 8, requires_grad=False)
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows) + rows @ (self.codes.to(rows.dtype) / 8)


def _job(lr: float = 0.1, of_rank: float = 0.0, of_size: float = 0.0, at_top: float = 0.0, codes: bool = False) -> Job:
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(40, 6, generator=draw), torch.randint(3, (40,), generator=draw)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Codes() if codes else nn.Linear(6, 3)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        rank = int(os.environ.get("RANK", 0))
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        scale = 1 + of_rank * rank + of_size * (ranks - 1) + at_top * (RANKS - 1)
        return F.cross_entropy(output, batch.targets) * scale

    recipe = Recipe(torch.optim.SGD, {"lr": lr})
    return Job(model=model, criterion=criterion, optimizer=recipe, train=TensorDataset(rows, labels), global_batch=8)


def asks_in_vain() -> Job:
    return _job()


def loss_of_rank() -> Job:
    return _job(of_rank=1.0)


def loss_of_size() -> Job:
    return _job(of_size=1.0)


def loss_of_size_at_top() -> Job:
    return _job(at_top=1.0)


def whole_numbers() -> Job:
    return _job(codes=True)


def still() -> Job:
    return _job(lr=0.0)
