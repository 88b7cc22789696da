"""The start of a script that horovodrun starts, one process for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.errors import Refused
from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import finish
from samestep.tasks.eject.runtime.run import CLOSURE, Run, World, special_parts

LAUNCH = "horovodrun -np {size} python {file}"
UNSUPPORTED = frozenset(("gather_outputs", CLOSURE))  # which need torch's process group


class Ranks(World):
    """The processes of Horovod."""

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
    close: Callable[[], None] | None = None,
    /,
    *,
    run: type[Run] = Run,
    **settings: Any,
) -> None:
    """Trains, saves and evaluates, as the rank that Horovod's environment names."""
    if "HOROVOD_RANK" not in os.environ:
        raise SystemExit(f"horovodrun starts this script: horovodrun -np 2 python {sys.argv[0]}")
    rank, size, local_rank, local_size = (
        int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    world = Ranks(rank, size, local_size, (device,))
    check(job, size)
    torch.set_num_threads(1)
    finish(job, train(job, world, run(job, world), **settings), world)
    if close:
        close()


def check(job: Job, size: int) -> None:
    """Refuses what Horovod's ranks cannot do together."""
    if size > 1 and job.sync_batchnorm:
        raise Refused("SyncBatchNorm does not find the other ranks of Horovod; leave sync_batchnorm out")
    if size > 1 and (absent := special_parts(job, size) & UNSUPPORTED):
        parts = " and ".join(sorted(absent))
        raise SystemExit(f"a script of Horovod's cannot train a job with {parts} on several ranks")
