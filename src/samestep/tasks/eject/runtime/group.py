"""The start of a script that torchrun starts, one process for each device."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import train_and_evaluate
from samestep.tasks.eject.runtime.world import World

LAUNCH = "python -m torch.distributed.run --nproc-per-node={size} {file}"


def start(
    job: Job,
    train: Callable[..., Any],
    *,
    close: Callable[[], None] | None = None,
    mesh: Any = None,
    **options: Any,
) -> None:
    """Trains, saves and evaluates, as the rank that torchrun's environment names. Never returns."""
    if "RANK" not in os.environ:
        raise SystemExit(f"torchrun starts this script: torchrun --nproc-per-node=2 {shlex.quote(sys.argv[0])}")
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    world = World(dist.get_rank(), dist.get_world_size(), local_size, (device,), mesh)
    train_and_evaluate(job, train, world, **options)
    dist.destroy_process_group()
    if close:
        close()
    sys.stdout.flush()
    os._exit(0)  # in the interpreter's own exit gloo's threads abort about one in three healthy processes
