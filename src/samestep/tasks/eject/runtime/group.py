"""The start of a script that torchrun starts, one process for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import finish
from samestep.tasks.eject.runtime.run import Run, World

LAUNCH = "python -m torch.distributed.run --nproc-per-node={size} {file}"


class Ranks(World):
    """The processes of torch's process group."""

    def gather(self, value: Any) -> list[Any]:
        of_rank: list[Any] = [None] * self.size
        dist.all_gather_object(of_rank, value)
        return of_rank

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Joins the process group; inside another such block it joins nothing and leaves nothing."""
    if dist.is_initialized():
        yield
        return
    if world.device == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(world.device)
        dist.init_process_group("nccl", device_id=torch.device(world.device))
    yield
    # No `finally`: after an error the others may never answer, and leaving the group could wait for them.
    dist.destroy_process_group()


def synced(job: Job, world: World) -> Job:
    """`job`, its BatchNorm layers made torch's SyncBatchNorm where it asks for that and there are other ranks."""
    if not job.sync_batchnorm or world.size == 1:
        return job
    return replace(job, model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def start(
    job: Job,
    train: Callable[..., Any],
    close: Callable[[], None] | None = None,
    /,
    *,
    run: type[Run] = Run,
    **settings: Any,
) -> None:
    """Trains, saves and evaluates, as the rank that torchrun's environment names. Never returns."""
    if "RANK" not in os.environ:
        raise SystemExit(
            f"torchrun starts this script: python -m torch.distributed.run --nproc-per-node=2 {sys.argv[0]}"
        )
    rank, size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    world = Ranks(rank, size, local_size, (device,))
    torch.set_num_threads(1)
    with process_group(world):
        finish(job, train(synced(job, world), world, run(job, world), **settings), world)
    if close:
        close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort about one in three healthy processes in the interpreter's own exit
