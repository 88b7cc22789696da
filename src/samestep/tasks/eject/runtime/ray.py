"""The start of a script whose ranks Ray Train's TorchTrainer starts: python SCRIPT 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import finish
from samestep.tasks.eject.runtime.group import Ranks, synced
from samestep.tasks.eject.runtime.run import Run

LAUNCH = "python {file} {size}"


def start(job: Job, train: Callable[..., Any], close: Callable[[], None] | None = None, /, **settings: Any) -> None:
    """Trains, saves and evaluates, on as many ranks as the script's argument says."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    if not sys.argv[1:]:
        raise SystemExit(f"this script takes the number of ranks: python {sys.argv[0]} 2")
    here = os.getcwd()

    def of_rank(config: dict[str, Any]) -> None:
        from ray.train.torch import get_device

        os.chdir(here)  # Ray's workers have a folder of their own
        rank, size, local_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        world = Ranks(rank, size, local_size, (str(get_device()),))
        torch.set_num_threads(1)
        finish(job, train(synced(job, world), world, Run(job, world), **settings), world)
        if close:
            close()

    workers = ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=torch.cuda.is_available())
    TorchTrainer(of_rank, train_loop_config={}, scaling_config=workers).fit()
