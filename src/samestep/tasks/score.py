"""Evaluates the weights in a file."""

from __future__ import annotations

from pathlib import Path

from samestep.data.fingerprint import check_same_data
from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.evaluate import evaluate
from samestep.rank.weights import model_with_weights
from samestep.records.files import write_array
from samestep.records.plan import EvaluateTask, Plan
from samestep.records.record import TrainingRecord
from samestep.world import World


def score(plan: Plan, training: EvaluateTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Evaluates the weights in training.init on the job's evaluation, and writes the model's outputs if requested."""
    if world.size > 1:
        check_same_data(job, world, training=False)
    model = model_with_weights(job.model, Path(training.init)).to(world.device)
    evaluated = evaluate(job, model, world, predictions=bool(training.predictions))
    if training.predictions and evaluated.predictions is not None:
        write_array(Path(training.predictions), evaluated.predictions)
    return TrainingRecord(evaluation=evaluated.record())
