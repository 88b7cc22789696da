"""Runs an engine's `train`, and tells what its errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from samestep.engine import Engine
from samestep.errors import Refused
from samestep.job import Job
from samestep.rank.hardware import is_out_of_memory
from samestep.tasks.largest_batch import out_of_memory
from samestep.training import Run
from samestep.world import World


def _synced(job: Job, world: World) -> Job:
    """`job`, its BatchNorm layers made torch's SyncBatchNorm where it asks for that and there are others."""
    if not job.sync_batchnorm or world.size == 1:
        return job
    return replace(job, model=lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(job.model()))


def run_engine(engine: Engine, job: Job, world: World, run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return engine.train(_synced(job, world), world, run, **settings)
    except RuntimeError as error:
        if is_out_of_memory(error) and run.part:
            error.__traceback__ = None  # whose frames hold what fills the memory
            raise out_of_memory(job, run.part, world) from None
        explain: Any = getattr(engine, "explain", None)
        sentence = explain(error, job) if explain else None
        if sentence is None:
            raise
        raise Refused(sentence) from error
