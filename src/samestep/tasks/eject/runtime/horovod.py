"""The start of a script that horovodrun starts, one process for each device."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import train_and_evaluate
from samestep.tasks.eject.runtime.world import World

LAUNCH = "horovodrun -np {size} python {file}"
UNSUPPORTED = frozenset(("gather_outputs", "an optimizer whose step needs a closure"))  # they need torch's own group


class HorovodWorld(World):
    """The place of this process among Horovod's."""

    def gather(self, value: Any) -> list[Any]:
        import horovod.torch as hvd

        return list(hvd.allgather_object(value))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        import horovod.torch as hvd

        for tensor in tensors:
            tensor.copy_(hvd.broadcast_object(tensor, root_rank=0))  # hvd.broadcast takes no boolean ones


def start(job: Job, train: Callable[..., Any], *, close: Callable[[], None] | None = None, **options: Any) -> None:
    """Trains, saves and evaluates, as the rank that Horovod's environment names."""
    if "HOROVOD_RANK" not in os.environ:
        raise SystemExit(f"horovodrun starts this script: horovodrun -np 2 python {shlex.quote(sys.argv[0])}")
    rank, size, local_rank, local_size = (
        int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
    train_and_evaluate(job, train, HorovodWorld(rank, size, local_size, (device,)), **options)
    if close:
        close()
