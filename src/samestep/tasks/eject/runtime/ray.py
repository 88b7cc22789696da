"""The start of a script whose ranks Ray Train's TorchTrainer starts: python SCRIPT 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import train_and_evaluate
from samestep.tasks.eject.runtime.world import World

LAUNCH = "python {file} {size}"
IS_RANK = "SCRIPT_IS_A_RANK"  # environment variable: TorchTrainer has started this process


def start(
    job: Job, train: Callable[..., Any], *, ranks: int, close: Callable[[], None] | None = None, **options: Any
) -> None:
    """Trains, saves and evaluates as a rank; outside of one, starts as many ranks as the script's argument says."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, get_device

    def run_again(script: dict[str, Any]) -> None:
        """Runs this script in a worker of Ray Train, which has a folder of its own, and none of the script's modules:
        a function within a function is sent as it is."""
        import os
        import runpy
        import sys

        os.chdir(script["folder"])
        os.environ[script["variable"]] = "1"
        sys.argv = script["argv"]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")

    if IS_RANK not in os.environ:
        workers = ScalingConfig(num_workers=ranks, use_gpu=torch.cuda.is_available())
        script = {"argv": [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], "folder": os.getcwd(), "variable": IS_RANK}
        TorchTrainer(run_again, train_loop_config=script, scaling_config=workers).fit()
        return
    rank, size, local_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    train_and_evaluate(job, train, World(rank, size, local_size, (str(get_device()),)), **options)
    if close:
        close()
