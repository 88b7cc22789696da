"""The start of a script that torchrun starts, one process for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.job import Job
from samestep.tasks.eject.runtime.plain_evaluation import finish
from samestep.tasks.eject.runtime.plain_run import Run

LAUNCH = "python -m torch.distributed.run --nproc-per-node={size} {file}"


@dataclass(frozen=True)
class World:
    """The place of this process in torch's process group."""

    rank: int
    size: int
    device: str

    @property
    def local_size(self) -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def synced(job: Job, world: World) -> Job:
    """Returns the job with torch's SyncBatchNorm for its BatchNorm layers, where there are other ranks."""
    return job if world.size == 1 else replace(job, model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def start(
    job: Job,
    train: Callable[..., Any],
    *,
    checkpoint: str = "",
    close: Callable[[], None] | None = None,
    run: Callable[..., Run] = Run,
) -> None:
    """Trains, saves and evaluates, as the rank that torchrun's environment names. Never returns."""
    if "RANK" not in os.environ:
        raise SystemExit(f"torchrun starts this script: torchrun --nproc-per-node=2 {sys.argv[0]}")
    torch.set_num_threads(1)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    world = World(dist.get_rank(), dist.get_world_size(), device)
    finish(job, train(synced(job, world) if job.sync_batchnorm else job, world, run(job, world, checkpoint)), world)
    dist.destroy_process_group()
    if close:
        close()
    sys.stdout.flush()
    os._exit(0)  # in the interpreter's own exit gloo's threads abort about one in three healthy processes
