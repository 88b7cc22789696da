"""Trains the whole job, for the user."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.data.same_data import check_alike
from samestep.data.schedule import schedule_of
from samestep.engine import Engine
from samestep.job import Job
from samestep.rank import hardware
from samestep.rank.best_weights import Watch
from samestep.rank.graceful_stop import Stop
from samestep.rank.group import meeting_store
from samestep.rank.weights import started_from
from samestep.records.record import tell
from samestep.run import Run
from samestep.tasks.run_engine import run_engine
from samestep.world import World

Plan = dict[str, Any]


def train(plan: Plan, step: Plan, job: Job, engine: Engine, world: World) -> dict[str, Any]:
    """The whole job, for the user: progress, a final evaluation, and weights.safetensors from rank 0.

    A stop that somebody asks for ends it after a step; then too, there are weights and an evaluation.
    """
    check_alike(job, world)
    whole = schedule_of(job, 1)
    steps = job.epochs * whole.steps_per_epoch
    folder = Path(plan["out"])
    best = tuple(step["best"]) if step["best"] else None
    every = step["every"] if job.evaluation is not None else 0
    watch = Watch(job, world, steps, Path(plan["weights"]), every, best, step["patience"])
    if step["init"]:
        job = replace(job, model=partial(started_from, job.model, Path(step["init"])))

    def progress(done: int, loss: float) -> None:
        seen = whole.rows_of(done)
        tell(world.rank, folder, "train", done=done, steps=steps, samples=seen, loss=loss, curve=watch.curve)

    stop = Stop(world, meeting_store())
    run = Run(job, world, steps, progress=progress if world.rank == 0 else None, stop=stop, watch=watch)
    state = run_engine(engine, job, world, run, plan["engine_settings"])
    seen = run.observations()
    tell(world.rank, folder, "evaluate")
    if not watch.ended:  # else libraries have taken one step more, which nobody asked for
        watch.add(len(seen["step_s"]), state, last=True)
    facts: Plan = {"peak_memory_bytes": hardware.peak_memory_bytes(world.device), "asked_steps": steps}
    facts["stopped"] = "early" if watch.ended else "asked" if len(seen["step_s"]) < steps else None
    return seen | facts | {"evaluation": watch.evaluated, "curve": watch.curve, "best_at": watch.best_at}
