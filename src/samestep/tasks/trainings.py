"""Runs a plan's trainings in sequence, in one process group."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from samestep import engine as engines
from samestep.engine import Engine
from samestep.job import Job
from samestep.rank import flight_recorder, hardware
from samestep.rank.hardware import set_threads
from samestep.rank.membership import says_lost
from samestep.rank.process_group import process_group
from samestep.rank.step_costs import LOOKED_AT, StepCosts
from samestep.rank.threaded_group import active_turns
from samestep.records.plan import MeasureTask, Plan, ProveTask
from samestep.records.record import Progress, attempt, write_progress
from samestep.records.training_record import TrainingRecord
from samestep.tasks.inspect.load import build
from samestep.tasks.prove import prove
from samestep.tasks.run import evaluate_weights, run_training
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World
from samestep.world.heartbeat import ENDING, heartbeat
from samestep.world.imports import without_collections
from samestep.world.mesh import Mesh


def measure(plan: Plan, training: MeasureTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Trains the unchanged job for some steps, without the proof's observations between them.

    Runs before any other training in the process, because the peak memory never goes down again.
    """
    micro_batches = engine.layout(world, **plan.engine_settings).micro_batches
    mesh = world.mesh or Mesh(**{engine.axes[0]: world.size})
    costs = StepCosts(world, mesh, training.steps) if training.costs else None
    steps = training.steps + (LOOKED_AT if costs else 0)
    run = Run(job, world, steps, micro_batches=micro_batches, costs=costs)
    run_engine(engine, job, world, run, plan.engine_settings)
    peak = costs.peak_memory_bytes if costs else hardware.peak_memory_bytes(world.device)
    record = replace(run.observations(), peak_memory_bytes=peak)
    if costs is None:
        return record
    measured = slice(sum(step < training.steps for step in record.step_of))
    return replace(
        record,
        cost=costs.cost,
        losses=record.losses[measured],
        step_of=record.step_of[measured],
        weight_of=record.weight_of[measured],
        step_s=record.step_s[: training.steps],
        wait_s=record.wait_s[: training.steps],
        busy_s=record.busy_s[: training.steps],
    )


KINDS: dict[str, Callable[..., TrainingRecord]] = {
    "measure": measure,
    "prove": prove,
    "run": run_training,
    "evaluate": evaluate_weights,
}


def work(plan: Plan, world: World) -> tuple[dict[str, TrainingRecord], int]:
    """Runs the plan's trainings. Returns name -> what this rank observed, and the threads of its first training."""
    job = build(plan.job, plan.settings)
    if any(training.kind != "evaluate" for training in plan.trainings):
        with without_collections():  # torch would import it when the first optimizer is created
            importlib.import_module("torch._dynamo")
    engine = engines.load(plan.engine)
    observed = {}
    threads: list[int] = []
    flight_recorder.enable()
    # Opened even for one rank, so that no engine's model outlives its group: DDP's destructor could wait for ever.
    with nullcontext() if engine.needs.processes == "one" else process_group(world, plan.asked, _backend(plan, world)):
        if engine.needs.processes != "one" and not active_turns():
            flight_recorder.serve(Path(plan.out), world.rank)
        for training in plan.trainings:
            heartbeat.build()
            write_progress(world.rank, Path(plan.out), Progress(training.name, attempt(), ranks=world.size))
            wanted = plan.proof_threads if training.kind == "prove" else plan.threads
            threads.append(set_threads(wanted, plan.nproc))
            observed[training.name] = KINDS[training.kind](plan, training, job, engine, world)
        heartbeat.begin(ENDING)
        flight_recorder.end()
    return observed, threads[0] if threads else 1


def _backend(plan: Plan, world: World) -> str:
    """Returns the backend of the plan's process group; '': that of the world."""
    if world.device == "cpu":
        return ""
    trained = [training for training in plan.trainings if training.kind != "evaluate"]
    given = [task.engine_settings if isinstance(task, ProveTask) else plan.engine_settings for task in trained]
    layouts = [engines.load(plan.engine).layout(world, **settings) for settings in given]
    return "cpu:gloo,cuda:nccl" if any(layout.reduces_on_cpu for layout in layouts) else ""


def is_lost_peer(plan: Plan, error: BaseException) -> bool:
    """Returns whether an error only reports that another rank is lost, to torch or to the plan's engine."""
    return says_lost(error) or engines.load(plan.engine).checks.says_lost(error)


def close(plan: Plan) -> None:
    """Calls the close() of the plan's engine, if it has one."""
    engine = engines.load(plan.engine)
    if engine.close:
        engine.close()
