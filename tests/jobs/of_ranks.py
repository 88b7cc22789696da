"""Jobs that ask which rank they are, and one whose optimizer moves nothing."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe


def _job(lr: float = 0.1, of_rank: float = 0.0, of_size: float = 0.0) -> Job:
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(40, 6, generator=draw), torch.randint(3, (40,), generator=draw)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        rank = int(os.environ.get("RANK", 0))
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        return F.cross_entropy(output, batch.targets) * (1 + of_rank * rank + of_size * (ranks - 1))

    recipe = Recipe(torch.optim.SGD, {"lr": lr})
    return Job(model=model, criterion=criterion, optimizer=recipe, train=TensorDataset(rows, labels), global_batch=8)


def asks_in_vain() -> Job:
    return _job()


def loss_of_rank() -> Job:
    return _job(of_rank=1.0)


def loss_of_size() -> Job:
    return _job(of_size=1.0)


def still() -> Job:
    return _job(lr=0.0)
