"""Trains the whole job, and evaluates weights: what `samestep run` and `evaluate` do on each rank."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from samestep.data.fingerprint import check_same_data
from samestep.data.schedule import schedule_of
from samestep.engine import Engine
from samestep.errors import UserError
from samestep.job import Job
from samestep.message import message
from samestep.rank import hardware
from samestep.rank.checkpoints import Checkpoints, StopAfter, TrainingIdentity, identity_of
from samestep.rank.evaluate import BestWeights, evaluate
from samestep.rank.graceful_stop import GracefulStop
from samestep.rank.guards import Guards
from samestep.rank.listeners import Listeners, listeners_of
from samestep.rank.process_group import checkpoint_store, export_store, stop_store
from samestep.rank.spot_check import ReplayProcess, SpotChecks
from samestep.rank.step_profile import StepProfile
from samestep.rank.weights import export, model_with_weights, on_first, trainable
from samestep.records.checkpoint import FOLDER
from samestep.records.files import write_array
from samestep.records.launch_files import OF_SPOT_CHECKS
from samestep.records.plan import EvaluateTask, Plan, RunTask
from samestep.records.record import Progress, attempt, write_progress
from samestep.records.spot_check import CHECKS, SpotCheckPlan, spot_checks_in
from samestep.records.spot_check import FOLDER as SPOT_CHECK_FOLDER
from samestep.records.training_record import TrainingRecord
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World
from samestep.world.regular_files import fresh_folder


def run_training(plan: Plan, training: RunTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Trains with progress and evaluations. Rank 0 writes the weights to training.weights.

    A graceful stop ends the training early; the weights are written and evaluated all the same.
    """
    schedule = schedule_of(job, 1)
    identity = identity_of(job, schedule, check_same_data(job, world))
    steps = job.steps(schedule.steps_per_epoch)
    folder = Path(plan.out)
    called = listeners_of(job, training.log, Path(training.weights).parent) if world.rank == 0 else []
    listeners = Listeners(called, schedule.rows_of) if called else None
    best = _evaluations(training, job, world, steps, listeners)
    if training.init:
        job = replace(job, model=partial(model_with_weights, job.model, Path(training.init)))

    def progress(done: int, loss: float) -> None:
        samples = schedule.rows_of(done)
        now = Progress(
            "run",
            attempt(),
            done,
            steps=steps,
            samples=samples,
            loss=loss,
            curve=best.curve,
            resumed_from=run.count.first,
            ranks=world.size,
        )
        write_progress(world.rank, folder, now)

    checkpoints = _checkpoints(plan, training, world, identity)
    stop = StopAfter(training.stop_after) if training.stop_after else GracefulStop(world, stop_store())
    spot_checks = _spot_checks(plan, training, job, engine, world=world, steps=steps)
    profile = _profile(training, world, folder, steps)
    run = Run(
        job,
        world,
        steps,
        progress=progress if world.rank == 0 else None,
        stop=stop,
        evaluator=best,
        listeners=listeners,
        checkpoints=checkpoints,
        guards=Guards(training.on_nan, training.check_replicas),
        spot_checks=spot_checks,
        profile=profile,
        micro_batches=engine.layout(world, **plan.engine_settings).micro_batches,
    )
    state = run_engine(engine, job, world, run, plan.engine_settings)
    if profile:
        profile.close()
    checkpoints.close()
    observed = run.observations()
    done = run.count.first + len(observed.step_s)
    write_progress(world.rank, folder, Progress("evaluate", attempt(), ranks=world.size))
    if not best.ended:  # else the weights are one step past the last evaluation: see GracefulStop.after
        best.add(done, state, last=True)
    best.finish()
    if listeners:
        listeners.close()
    if spot_checks:
        spot_checks.close()
    if training.export:
        on_first(partial(export, job.model, Path(training.weights), Path(training.export)), world, export_store())
    return replace(
        observed,
        peak_memory_bytes=hardware.peak_memory_bytes(world.device),
        asked_steps=steps,
        stopped="early" if best.ended else "requested" if done < steps else None,
        evaluation=best.evaluated,
        curve=best.curve,
        best_at=best.best_at,
        changes=checkpoints.identity.changes if checkpoints.identity else (),
        spot_checks=tuple(spot_checks_in(Path(training.weights).with_name(CHECKS))) if spot_checks else (),
    )


def _spot_checks(
    plan: Plan, training: RunTask, job: Job, engine: Engine, *, world: World, steps: int
) -> SpotChecks | None:
    """Returns what looks at steps of a training, with the process that replays them on rank 0."""
    if not training.spot_check:
        return None
    from torch._inductor import config as inductor

    inductor.fallback_random = True  # dropout that is compiled draws what the replay's draws
    folder, checks = (Path(training.weights).with_name(name) for name in (SPOT_CHECK_FOLDER, CHECKS))
    replays = None
    if world.rank == 0:
        fresh_folder(folder.parent, folder, OF_SPOT_CHECKS)  # also of a launch that was killed
        layout = engine.layout(world, **plan.engine_settings)
        device = os.environ.get("SAMESTEP_DEVICES", world.device).split(",")[-1]
        stops = training.spot_check_stops and not training.stop_after
        replays = ReplayProcess(
            SpotCheckPlan(
                plan.job, plan.settings, layout, world_size=world.size, device=device, checks=str(checks), stops=stops
            ),
            folder,
        )
    return SpotChecks(world, training.spot_check, steps=steps, folder=folder, replays=replays)


def evaluate_weights(plan: Plan, training: EvaluateTask, job: Job, engine: Engine, world: World) -> TrainingRecord:
    """Evaluates the weights in training.init on the job's evaluation, and writes the model's outputs if requested."""
    if world.size > 1:
        check_same_data(job, world, training=False)
    model = model_with_weights(job.model, Path(training.init)).to(world.device)
    evaluated = evaluate(job, model, world, predictions=bool(training.predictions))
    if training.predictions and evaluated.predictions is not None:
        write_array(Path(training.predictions), evaluated.predictions)
    return TrainingRecord(evaluation=evaluated.record())


def _profile(training: RunTask, world: World, folder: Path, steps: int) -> StepProfile | None:
    """Returns what traces the steps of --profile; None without it. Raises UserError where the training has fewer."""
    if training.profile is None:
        return None
    if training.profile[0] > steps:
        raise UserError(message("profile_begins_after_the_training", steps=steps, last=training.profile[0] - 1))
    return StepProfile(world, folder, training.profile)


def _evaluations(training: RunTask, job: Job, world: World, steps: int, listeners: Listeners | None) -> BestWeights:
    """Returns what evaluates a training, and keeps its weights. Raises UserError for a scheduler that needs more."""
    epochs, steps_apart = (training.every, training.every_steps) if job.evaluation is not None else (0, 0)
    if job.scheduler and job.scheduler.every == "evaluation" and not (epochs or steps_apart):
        raise UserError("the scheduler steps after evaluations; give --evaluate-every or --evaluate-steps 1 or more")
    return BestWeights(
        job,
        world,
        steps,
        weights=Path(training.weights),
        every=epochs,
        best=training.best,
        patience=training.patience,
        every_steps=steps_apart,
        listeners=listeners,
        saved=trainable(job.model()) if job.save == "trainable" and world.rank == 0 else None,
    )


def _checkpoints(plan: Plan, training: RunTask, world: World, identity: TrainingIdentity | None) -> Checkpoints:
    """Returns the checkpoints of a training, beside its weights."""
    return Checkpoints(
        Path(training.weights).parent / FOLDER,
        world,
        checkpoint_store(),
        every=training.checkpoint_every,
        keep=training.keep,
        resume=training.resume,
        engine=plan.engine,
        request=plan.asked,
        attempt=attempt(),
        identity=identity,
        changed_data=training.resume_changed_data,
    )
