"""The start of a script that is one process: python SCRIPT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.job import Job
from samestep.tasks.eject.runtime.plain_evaluation import finish
from samestep.tasks.eject.runtime.plain_run import Run

LAUNCH = "python {file}"
LONE_BATCHNORM = False  # SyncBatchNorm does not find this engine's other replicas


@dataclass(frozen=True)
class World:
    """The devices of this process, which is alone."""

    devices: tuple[str, ...]
    rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def device(self) -> str:
        return self.devices[0]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        pass


def start(
    job: Job,
    train: Callable[..., Any],
    *,
    checkpoint: str = "",
    close: Callable[[], None] | None = None,
    run: Callable[..., Run] = Run,
) -> None:
    """Trains, saves and evaluates."""
    torch.set_num_threads(1)
    world = World(tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",))
    if job.sync_batchnorm and LONE_BATCHNORM and len(world.devices) > 1:
        raise SystemExit("SyncBatchNorm does not find the other replicas of this engine; leave sync_batchnorm out")
    finish(job, train(job, world, run(job, world, checkpoint)), world)
    if close:
        close()
