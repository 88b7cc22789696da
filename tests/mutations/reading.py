"""Jobs whose rows the loader reads in ways that tensors in memory do not take: files, windows, one row at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from samestep import Arrays, Job, Recipe, Windows

ROWS = Path(__file__).parent / "rows"


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """Rows by index, and nothing else: no __getitems__."""

    def __init__(self, rows: int) -> None:
        self.inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(31))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.inputs[index].abs().argmax() % 3


def _linear() -> nn.Module:
    torch.manual_seed(32)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _job(train: object, evaluation: object, global_batch: int) -> Job:
    return Job(
        model=_linear,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=train,
        evaluation=evaluation,
        global_batch=global_batch,
        epochs=2,
    )


def arrays(global_batch: int = 10) -> Job:
    """Rows in several files, of several columns."""
    columns = [sorted(ROWS.glob(f"{name}-*.npy")) for name in ("inputs", "targets")]
    return _job(Arrays(*columns), Arrays(*(files[:1] for files in columns)), global_batch)


def one_by_one(rows: int = 45, global_batch: int = 10) -> Job:
    return _job(OneByOne(rows), OneByOne(17), global_batch)


def windows(rows: int = 45, global_batch: int = 10) -> Job:
    """Windows that overlap, into one array of tokens."""
    tokens = torch.randint(11, (rows * 3 + 40,), generator=torch.Generator().manual_seed(33))

    def model() -> nn.Module:
        torch.manual_seed(34)
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=Windows(tokens[30:], 6, 3),
        evaluation=Windows(tokens[:30], 6, 1),
        global_batch=global_batch,
        epochs=2,
    )
