"""Evaluates weights that a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.data.same_data import check_alike
from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.evaluate import evaluate
from samestep.rank.weights import started_from
from samestep.records.record import write_array
from samestep.world import World

Plan = dict[str, Any]


def score(plan: Plan, step: Plan, job: Job, engine: Engine, world: World) -> dict[str, Any]:
    """What the weights in a file come to on the job's evaluation, and the outputs for each of its rows."""
    check_alike(job, world, training=False)
    model = started_from(job.model, Path(step["init"])).to(world.device)
    found = evaluate(job, model, world, predictions=bool(step["predictions"]))
    if found.predictions is not None:
        write_array(Path(step["predictions"]), found.predictions)
    return {"evaluation": found.record()}
