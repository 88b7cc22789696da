"""samestep's own training and evaluation of a job on an engine, as one rank: what an ejected script must come to.

Its arguments: a file with the job, its settings, the engine and its settings as JSON; a file for what it comes to.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from samestep import engine as engines
from samestep.data.schedule import schedule_of
from samestep.rank.evaluate import evaluate, plain_model
from samestep.rank.process_group import process_group
from samestep.tasks.inspect.load import build
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World
from samestep.world.mesh import parse_mesh


def main(asked_file: Path, came_to: Path) -> None:
    asked = json.loads(asked_file.read_text())
    torch.set_num_threads(1)
    job, engine, world = (
        build(asked["job"], asked["settings"]),
        engines.load(asked["engine"]),
        replace(World.from_env(os.environ), mesh=parse_mesh(asked["mesh"])),
    )
    with nullcontext() if engine.needs.processes == "one" else process_group(world):
        steps = job.max_steps or job.epochs * schedule_of(job, 1).steps_per_epoch
        fewest = engine.layout(world, **asked["engine_settings"]).micro_batches
        run = Run(job, world, steps, micro_batches=fewest)
        state = run_engine(engine, job, world, run, asked["engine_settings"])
        means = evaluate(job, plain_model(job, state, world), world).means() if job.evaluation is not None else None
    if world.rank == 0:
        torch.save({"weights": {name: value.cpu() for name, value in state.items()}, "means": means}, came_to)
    if engine.close:
        engine.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
