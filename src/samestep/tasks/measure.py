"""Measures a training: the job as it is, for some steps, with nothing of ours between them."""

from __future__ import annotations

from typing import Any

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank import hardware
from samestep.run import Run
from samestep.tasks.run_engine import run_engine
from samestep.world import World

Plan = dict[str, Any]


def measure(plan: Plan, step: Plan, job: Job, engine: Engine, world: World) -> dict[str, Any]:
    """The job as it is, for some steps, with nothing of ours between them. Comes first: memory only ever peaks."""
    run = Run(job, world, step["steps"])
    run_engine(engine, job, world, run, plan["engine_settings"])
    return run.observations() | {"peak_memory_bytes": hardware.peak_memory_bytes(world.device)}
