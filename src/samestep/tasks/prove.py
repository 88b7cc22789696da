"""Trains for the proof: a few observed steps, and the weights at their end."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.evaluate import evaluate, plain_model
from samestep.records.record import write_state
from samestep.run import Run
from samestep.tasks.proof_job import Training, proof_job, steps_of
from samestep.tasks.run_engine import run_engine
from samestep.world import World

Plan = dict[str, Any]


def prove(plan: Plan, step: Plan, job: Job, engine: Engine, world: World) -> dict[str, Any]:
    """One training of the proof, observed, with the weights that rank 0 ends with."""
    training = Training(**{field.name: step[field.name] for field in fields(Training)})
    small = proof_job(job, training)
    run = Run(small, world, steps_of(training), observe=True)
    state = run_engine(engine, small, world, run, step["engine_settings"])
    if world.rank == 0:
        write_state(Path(plan["out"]), world.rank, step["as"], state)
    return run.observations() | _evaluated(small, state, world)


def _evaluated(job: Job, state: dict[str, torch.Tensor], world: World) -> dict[str, Any]:
    if job.evaluation is None:
        return {"evaluation": None}
    return {"evaluation": evaluate(job, plain_model(job, state, world), world).record()}
