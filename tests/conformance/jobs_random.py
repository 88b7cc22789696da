"""Jobs whose datasets draw from the global random generators, as torchvision's transforms do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from samestep import Job, Recipe
from samestep.data.stream import Stream

X = torch.randn(61, 12, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Transformed(Dataset[Any]):
    """Noise from torch, a scale from numpy, a sign from Python, as `of` names them."""

    def __init__(self, first: int, rows: int, of: str) -> None:
        self.first, self.rows, self.of = first, rows, of

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return transformed(X[self.first + index], self.of), Y[self.first + index]


class Batched(Transformed):
    """The same, read many at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class Shuffled(IterableDataset[Any]):
    """A stream through a buffer that is shuffled with Python's random numbers, and then transformed."""

    def __init__(self, rows: int, of: str) -> None:
        self.rows, self.of = rows, of

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer: list[int] = []
        for index in range(self.rows):
            buffer.append(index)
            if len(buffer) > 5:
                yield self._row(buffer.pop(random.randrange(len(buffer))))
        yield from map(self._row, buffer)

    def _row(self, index: int) -> tuple[Tensor, Tensor]:
        return transformed(X[index], self.of), Y[index]


class GoesOn(Shuffled):
    """A stream that goes on where it was left."""

    at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.at, self.rows):
            self.at = index + 1
            yield self._row(index)
        self.at = 0


class Stateful(GoesOn):
    """The same with torchdata's protocol, by which it begins anew."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


STREAMS = {"stream": Shuffled, "goes on": GoesOn, "stateful": Stateful}


def transformed(row: Tensor, of: str) -> Tensor:
    if "torch" in of and torch.rand(()) < 0.7:
        row = row + 0.1 * torch.randn_like(row)
    if "numpy" in of:
        row = row * float(np.random.normal(1, 0.1))
    if "python" in of:
        row = row if random.random() < 0.5 else row.flip(0)
    return row


def mixed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """MixUp of the inputs, as a collate function."""
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    share = float(np.random.beta(8, 1))
    return share * inputs + (1 - share) * inputs[torch.randperm(len(inputs))], targets


def wobbly(sample: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return sample[0] * random.uniform(0.9, 1.1), sample[1]


def job(
    of: str = "torch numpy python",
    kind: Literal["rows", "batched", "stream", "goes on", "stateful"] = "rows",
    mixes: bool = False,
    augments: bool = False,
    workers: int = 0,
) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    data: Any = (
        Stream(STREAMS[kind](44, of), 44)
        if kind in STREAMS
        else (Batched if kind == "batched" else Transformed)(0, 44, of)
    )
    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=data,
        evaluation=Transformed(44, 17, of),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        collate=mixed if mixes else None,
        augment=wobbly if augments else None,
        global_batch=10,
        workers=workers,
        shuffle=kind not in STREAMS,
    )
