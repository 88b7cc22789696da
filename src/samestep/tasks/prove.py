"""Runs the proof's trainings: a few observed steps, and the final weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.evaluate import evaluate, plain_model
from samestep.records.plan import Plan, Prove
from samestep.records.record import Observations, write_state
from samestep.tasks.proof_job import proof_job, steps_of
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World


def prove(plan: Plan, training: Prove, job: Job, engine: Engine, world: World) -> Observations:
    """Runs one observed training of the proof, and evaluates it. Rank 0 writes the final weights."""
    small = proof_job(job, training)
    run = Run(small, world, steps_of(training), observe=True)
    state = run_engine(engine, small, world, run, training.engine_settings)
    if world.rank == 0:
        write_state(Path(plan.out), world.rank, training.name, state)
    if small.evaluation is None:
        return run.observations()
    evaluation = evaluate(small, plain_model(small, state, world), world).record()
    return replace(run.observations(), evaluation=evaluation)
