"""Runs a plan's trainings, one after the other, in one process group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from samestep import engine as engines
from samestep.job import Job
from samestep.rank.group import process_group
from samestep.records.record import tell
from samestep.tasks.inspect.load import build
from samestep.tasks.measure import measure
from samestep.tasks.prove import prove
from samestep.tasks.score import score
from samestep.tasks.train import train
from samestep.world import World

Plan = dict[str, Any]

KINDS: dict[str, Callable[[Plan, Plan, Job, engines.Engine, World], dict[str, Any]]] = {
    "measure": measure,
    "prove": prove,
    "train": train,
    "score": score,
}


def work(plan: Plan, world: World) -> dict[str, Any]:
    """Runs the plan's trainings, one after the other, in one process group. Returns this rank's record."""
    job = build(plan["job"], plan["settings"])
    engine = engines.load(plan["engine"])
    trainings = {}
    # Opened even for one rank, so that no engine's model outlives its group: DDP's destructor can then wait for ever.
    with nullcontext() if engine.PROCESSES == "one" else process_group(world):
        for step in plan["trainings"]:
            tell(world.rank, Path(plan["out"]), step["as"])
            trainings[step["as"]] = KINDS[step["kind"]](plan, step, job, engine, world)
    return {"trainings": trainings}


def close(plan: Plan) -> None:
    """Lets the plan's engine end what it keeps between trainings."""
    ends: Any = getattr(engines.load(plan["engine"]), "close", None) if "engine" in plan else None
    if ends:
        ends()
