"""A job that hangs on rank 1, in the way that its setting `fault` names. The lines where it hangs are marked."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from samestep import Batch, Job, Recipe

FOREVER_S = 3600.0
BAD = int(os.environ.get("RANK", "-1")) == 1
IN_STEP = 4  # the fourth forward pass
LOCK = threading.Lock()
TRAINED = threading.Event()  # before, samestep compares the ranks' datasets


class Rows(Dataset[Any]):
    """row_s: seconds that a row takes."""

    def __init__(self, rows: int, row_s: float = 0.0) -> None:
        self.rows, self.row_s, self.read = rows, row_s, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if BAD and self.hangs():
            load_image()
        time.sleep(self.row_s)
        return torch.full((4,), index / self.rows), torch.tensor(index % 3)

    def hangs(self) -> bool:
        return False


class HangsInTraining(Rows):
    def hangs(self) -> bool:
        # When some steps are over: before, 16 rows are read twice to compare the ranks' datasets.
        return self.read == 40


class HangsInEvaluation(Rows):
    def hangs(self) -> bool:
        return TRAINED.is_set()


def begins() -> None:
    """Leaves a file in the current folder, whose time is the hang's."""
    Path("hung").touch()


def load_image() -> None:
    begins()
    time.sleep(FOREVER_S)  # hangs: dataset, worker, evaluation


class Net(nn.Module):
    """Two layers. fault: what rank 1 does in its fourth training step, and for some faults what the others do."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        self.fault, self.steps = FAULTS.get(fault), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        TRAINED.set()
        if self.fault and self.training and self.steps == IN_STEP and dist.is_initialized() and dist.get_rank() >= 0:
            self.fault()
        return self.layers(x)


def asleep() -> None:
    if BAD:
        begins()
        time.sleep(FOREVER_S)  # hangs: model


def endless() -> None:
    turns = 0
    begins()
    while BAD:  # hangs: loop
        turns += 1  # hangs: loop


def extra_collective() -> None:
    if BAD:
        begins()
        dist.barrier()  # hangs: collective


def other_operation() -> None:
    if BAD:
        begins()
        dist.broadcast(torch.ones(4), 0)  # hangs: operation
    else:
        dist.all_reduce(torch.ones(4))


def other_shape() -> None:
    if BAD:
        begins()
        dist.all_reduce(torch.ones(1000))  # hangs: shapes
    else:
        dist.all_reduce(torch.ones(4))  # hangs: shapes


def other_branch() -> None:
    begins()
    if not BAD:
        dist.barrier()  # hangs: branch


def stopped() -> None:
    if BAD:
        begins()
        # os.kill asks for any thread of the process: this one may go on for a moment.
        signal.raise_signal(signal.SIGSTOP)  # hangs: stop


def holds_the_gil() -> None:
    if BAD:
        begins()
        ctypes.PyDLL(None).sleep(int(FOREVER_S))  # hangs: gil


def takes_a_lock_twice() -> None:
    if BAD:
        begins()
        LOCK.acquire()
        LOCK.acquire()  # hangs: lock


def slow_once() -> None:
    if BAD:
        time.sleep(2.0)


FAULTS: dict[str, Callable[[], None]] = {
    "model": asleep,
    "loop": endless,
    "collective": extra_collective,
    "operation": other_operation,
    "shapes": other_shape,
    "branch": other_branch,
    "stop": stopped,
    "gil": holds_the_gil,
    "lock": takes_a_lock_twice,
    "slow": slow_once,
}


def hits(output: Tensor, batch: Batch) -> Tensor:
    return output.argmax(1) == batch.targets


def returns_early(output: Tensor, batch: Batch) -> Tensor:
    if BAD:
        begins()
        return hits(output, batch)
    dist.barrier()  # hangs: early
    return hits(output, batch)


def job(fault: str = "", row_s: float = 0.0) -> Job:
    return Job(
        model=lambda: Net(fault),
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=HangsInTraining(192) if fault in ("dataset", "worker") else Rows(96, row_s),
        evaluation=HangsInEvaluation(36) if fault == "evaluation" else Rows(36),
        metrics={"accuracy": returns_early if fault == "early" and "RANK" in os.environ else hits},
        global_batch=12,
        epochs=2,
        workers=1 if fault == "worker" else 0,
    )
