"""Runs the proof's trainings: a few observed steps, and the final weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.evaluate import evaluate, plain_model
from samestep.records.plan import Plan, Prove
from samestep.records.record import Observations, write_state
from samestep.tasks.proof_job import proof_job, steps_of
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World


class EachStep:
    """Evaluates after every step of a proof whose learning rate depends on evaluations."""

    def __init__(self, job: Job, world: World, steps: int) -> None:
        self.job, self.world, self.steps = job, world, steps

    def begin(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        return done < self.steps

    def evaluate(self, done: int) -> bool:
        self._means = evaluate(self.job, plain_model(self.job, self._state(), self.world), self.world).means()
        return False

    def means(self) -> Mapping[str, float]:
        return self._means

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def files(self) -> list[Path]:
        return []


def prove(plan: Plan, training: Prove, job: Job, engine: Engine, world: World) -> Observations:
    """Runs one observed training of the proof, and evaluates it. Rank 0 writes the final weights."""
    small = proof_job(job, training)
    by_evaluation = small.scheduler is not None and small.scheduler.every == "evaluation"
    steps = steps_of(training, job)
    run = Run(small, world, steps, observe=True, evaluator=EachStep(small, world, steps) if by_evaluation else None)
    state = run_engine(engine, small, world, run, training.engine_settings)
    if world.rank == 0:
        write_state(Path(plan.out), world.rank, training.name, state)
    if small.evaluation is None:
        return run.observations()
    evaluation = evaluate(small, plain_model(small, state, world), world).record()
    return replace(run.observations(), evaluation=evaluation)
