"""The start of a script whose ranks Ray Train's TorchTrainer starts: python SCRIPT 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samestep.job import Job
from samestep.tasks.eject.runtime.group import World, synced
from samestep.tasks.eject.runtime.plain_evaluation import finish
from samestep.tasks.eject.runtime.plain_run import Run

LAUNCH = "python {file} {size}"
IS_RANK = "SCRIPT_IS_A_RANK"  # environment variable: TorchTrainer has started this process


def start(
    job: Job,
    train: Callable[..., Any],
    *,
    checkpoint: str = "",
    ranks: int,
    close: Callable[[], None] | None = None,
    run: Callable[..., Run] = Run,
) -> None:
    """Trains, saves and evaluates as a rank; outside of one, starts as many ranks as the script's argument says."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, get_device

    if IS_RANK not in os.environ:
        workers = ScalingConfig(num_workers=ranks, use_gpu=torch.cuda.is_available())
        script = {"argv": [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], "folder": os.getcwd(), "variable": IS_RANK}
        TorchTrainer(run_again, train_loop_config=script, scaling_config=workers).fit()
        return
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), str(get_device()))
    torch.set_num_threads(1)
    finish(job, train(synced(job, world) if job.sync_batchnorm else job, world, run(job, world, checkpoint)), world)
    if close:
        close()


def run_again(script: dict[str, Any]) -> None:
    """Runs this script in a worker of Ray Train, which has a folder of its own. It is sent there alone, so it imports
    what it needs."""
    import os
    import runpy
    import sys

    os.chdir(script["folder"])
    os.environ[script["variable"]] = "1"
    sys.argv = script["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
