"""Jobs whose loading fails, each in its own way, at sample 37 of 64."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from samestep import Job, Recipe
from samestep.errors import UserError

WIDE = 2**18  # floats of a sample: 1 MiB
UNREADABLE = "photos/37.jpg cannot be read; mend it"  # what the mistaken job of a user says


class Failing(Dataset[Any]):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 37:
            if self.how == "users":
                raise UserError(UNREADABLE)
            if self.how == "raises":
                raise ValueError("no such thing\nand more of it")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exits":
                os._exit(3)
            if self.how == "aborts":
                faulthandler.disable()  # its report would only look like a fault of the tests
                os.kill(os.getpid(), signal.SIGABRT)
        return torch.ones(WIDE if self.how == "wide" else 4), index % 3


class ByBatch(Failing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def job(how: str = "", workers: int = 2, by_batch: bool = False, seed: int = 0, collate: str = "") -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(WIDE if how == "wide" else 4, 3)

    def collated(samples: list[Any]) -> Any:
        inputs, targets = (torch.stack([torch.as_tensor(s[half]) for s in samples]) for half in (0, 1))
        if collate == "unpicklable":
            return {"x": inputs, "y": targets, "later": lambda: 0}
        if collate == "unshared":  # the queue would move it to shared memory
            return [inputs.clone(), targets]
        raise KeyError("label")

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=(ByBatch if by_batch else Failing)(how),
        collate=collated if collate else None,
        global_batch=8,
        epochs=2,
        seed=seed,
        workers=workers,
    )
