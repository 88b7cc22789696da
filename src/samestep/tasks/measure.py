"""Measures the speed of a training."""

from __future__ import annotations

from dataclasses import replace

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank import hardware
from samestep.records.plan import MeasureTask, Plan
from samestep.records.record import TrainingRecord
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World


def measure(plan: Plan, training: MeasureTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Trains the unchanged job for some steps, without the proof's observations between them.

    Runs before any other training in the process, because the peak memory never goes down again.
    """
    run = Run(job, world, training.steps)
    run_engine(engine, job, world, run, plan.engine_settings)
    return replace(run.observations(), peak_memory_bytes=hardware.peak_memory_bytes(world.device))
