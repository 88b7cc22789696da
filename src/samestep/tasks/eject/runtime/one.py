"""The start of a script that is one process: python SCRIPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.errors import Refused
from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import finish
from samestep.tasks.eject.runtime.run import Run, World

LAUNCH = "python {file}"


def start(
    job: Job,
    train: Callable[..., Any],
    close: Callable[[], None] | None = None,
    /,
    *,
    run: type[Run] = Run,
    lone_batchnorm: bool = False,
    **settings: Any,
) -> None:
    """Trains, saves and evaluates. lone_batchnorm: SyncBatchNorm does not find this engine's other replicas."""
    gpus = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    world = World(devices=gpus or ("cpu",))
    if job.sync_batchnorm and lone_batchnorm and len(world.devices) > 1:
        raise Refused("SyncBatchNorm does not find the other replicas of this engine; leave sync_batchnorm out")
    torch.set_num_threads(1)
    finish(job, train(job, world, run(job, world), **settings), world)
    if close:
        close()
