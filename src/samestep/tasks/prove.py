"""Runs the proof's trainings: a few observed steps, and the final weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from samestep.data.schedule import schedule_of
from samestep.engine import Engine
from samestep.job import Job
from samestep.job.module_outputs import ModuleOutputs
from samestep.rank.checkpoints import Checkpoints, StopAfter
from samestep.rank.evaluate import BestWeights, Evaluator, evaluate, plain_model
from samestep.rank.process_group import checkpoint_store
from samestep.rank.weights import StateDict
from samestep.records.checkpoint import Interval
from samestep.records.plan import OUTPUTS, Interrupted, Plan, ProveTask, interruption
from samestep.records.tensor_files import write_state
from samestep.records.training_record import TrainingRecord
from samestep.tasks.life import live
from samestep.tasks.proof_job import proof_job, steps_of
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World
from samestep.world.regular_files import make_folder


class EachStep:
    """Evaluates after every step of a proof whose learning rate depends on evaluations."""

    def __init__(self, job: Job, world: World, steps: int) -> None:
        self.job, self.world, self.steps = job, world, steps

    def begin(self, state: Callable[[], StateDict]) -> None:
        self._state = state

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        return done < self.steps

    def evaluate(self, done: int) -> bool:
        self._means = evaluate(self.job, plain_model(self.job, self._state(), self.world), self.world).means()
        return False

    def means(self) -> Mapping[str, float]:
        return self._means

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        pass

    def files(self) -> list[Path]:
        return []


def prove(plan: Plan, training: ProveTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Runs one observed training of the proof, and evaluates it. Rank 0 writes the final weights.

    Of an interrupted one, runs one part; the first part ends with a checkpoint, and nothing of it is evaluated.
    """
    from torch._inductor import config as inductor

    inductor.fallback_random = True  # dropout that is compiled draws what the reference's draws
    small = proof_job(job, training)
    if training.training == "life":
        return live(plan, training, small, engine, world)
    by_evaluation = small.scheduler is not None and small.scheduler.every == "evaluation"
    played = steps_of(training, small, schedule_of(small, 1).steps_per_epoch)
    steps = len(played)
    evaluator: Evaluator | None = EachStep(small, world, steps) if by_evaluation else None
    parts = training.interrupted
    if parts and small.evaluation is not None:  # as a training evaluates, whose state is in its checkpoints
        best = Path(parts.checkpoints) / f"{training.name}.safetensors"
        make_folder(best.parent)
        every = 1 if by_evaluation else 2
        evaluator = BestWeights(small, world, steps, best, best=("loss", "min"), every_steps=every)
    checkpoints = _checkpoints(plan, training.name, parts, world) if parts else None
    first = parts is not None and parts.part == "first"
    stop = StopAfter(interruption_of(training, small, steps)) if first else None
    outputs = ModuleOutputs() if training.notes_outputs else None
    run = Run(
        small,
        world,
        steps,
        observe=True,
        outputs=outputs,
        evaluator=evaluator,
        checkpoints=checkpoints,
        stop=stop,
        played=played,
        micro_batches=engine.layout(world, **training.engine_settings).micro_batches,
    )
    state = run_engine(engine, small, world, run, training.engine_settings)
    if checkpoints:
        checkpoints.close()
    if first:
        return run.observations()
    if outputs:
        write_state(Path(plan.out), world.rank, OUTPUTS.format(training.name), outputs.values())
    if world.rank == 0:
        write_state(Path(plan.out), world.rank, training.name, state)
    if small.evaluation is None:
        return run.observations()
    evaluation = evaluate(small, plain_model(small, state, world), world).record()
    return replace(run.observations(), evaluation=evaluation)


def interruption_of(training: ProveTask, small: Job, steps: int) -> int:
    """Returns how many steps the first part of an interrupted training has. small: the proof's job."""
    assert training.interrupted
    # Within an epoch each rank carries on the state of its own rows.
    only_at_end = small.carry_state and training.interrupted.other_ranks
    per_epoch = schedule_of(small, 1).steps_per_epoch
    return interruption(small.seed, training.training, steps, per_epoch, only_at_end=only_at_end)


def _checkpoints(plan: Plan, name: str, parts: Interrupted, world: World) -> Checkpoints:
    """Returns the checkpoints through which the state goes: one after each step, of which the newest is taken."""
    resume = "never" if parts.part == "first" else "auto"
    every = Interval(1, "steps") if parts.part == "first" else None
    return Checkpoints(
        Path(parts.checkpoints) / name,
        world,
        checkpoint_store(),
        every=every,
        keep=2,
        resume=resume,
        engine=plan.engine,
    )
