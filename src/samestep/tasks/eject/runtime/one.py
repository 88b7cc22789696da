"""The start of a script that is one process: python SCRIPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.job import Job
from samestep.tasks.eject.runtime.evaluation import train_and_evaluate
from samestep.tasks.eject.runtime.world import World

LAUNCH = "python {file}"


def start(job: Job, train: Callable[..., Any], *, close: Callable[[], None] | None = None, **options: Any) -> None:
    """Trains, saves and evaluates."""
    devices = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)
    train_and_evaluate(job, train, World(devices=devices), **options)
    if close:
        close()
