"""The start of a script that horovodrun starts, one process for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.job import Job
from samestep.tasks.eject.runtime.plain_evaluation import finish
from samestep.tasks.eject.runtime.plain_run import Run

LAUNCH = "horovodrun -np {size} python {file}"
UNSUPPORTED = frozenset(("gather_outputs", "an optimizer whose step needs a closure"))  # they need torch's own group


@dataclass(frozen=True)
class World:
    """The place of this process among Horovod's."""

    rank: int
    size: int
    device: str

    @property
    def local_size(self) -> int:
        return int(os.environ["HOROVOD_LOCAL_SIZE"])

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,)

    def gather(self, value: Any) -> list[Any]:
        import horovod.torch as hvd

        return list(hvd.allgather_object(value))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        import horovod.torch as hvd

        for tensor in tensors:
            tensor.copy_(hvd.broadcast_object(tensor, root_rank=0))  # hvd.broadcast takes no boolean ones


def start(
    job: Job,
    train: Callable[..., Any],
    *,
    checkpoint: str = "",
    close: Callable[[], None] | None = None,
    run: Callable[..., Run] = Run,
) -> None:
    """Trains, saves and evaluates, as the rank that Horovod's environment names."""
    if "HOROVOD_RANK" not in os.environ:
        raise SystemExit(f"horovodrun starts this script: horovodrun -np 2 python {sys.argv[0]}")
    rank, size, local_rank = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK"))
    if job.sync_batchnorm and size > 1:
        raise SystemExit("SyncBatchNorm does not find the other ranks of Horovod; leave sync_batchnorm out")
    torch.set_num_threads(1)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    finish(job, train(job, world, run(job, world, checkpoint)), world)
    if close:
        close()
