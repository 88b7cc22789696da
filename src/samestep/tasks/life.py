"""Lives a run of the proof's job: trains as `samestep run` does, unobserved, stops, starts again, and evaluates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samestep.data.stream import is_stream
from samestep.engine import Engine
from samestep.errors import say
from samestep.job import Job
from samestep.job.checks import nested
from samestep.rank.checkpoint_files import Saved, Stored, newest
from samestep.rank.weights import StateDict
from samestep.records.checkpoint import FOLDER, Interval
from samestep.records.files import replace_by
from samestep.records.plan import INIT, EvaluateTask, Plan, ProveTask, RunTask
from samestep.records.tensor_files import write_state
from samestep.records.training_record import RestartRecord, TrainingRecord
from samestep.tasks.inspect.load import build
from samestep.tasks.proof_job import life_steps, proof_job
from samestep.tasks.run import evaluate_weights, run_training
from samestep.world import World
from samestep.world.regular_files import make_folder, remove_made_folder


def live(plan: Plan, training: ProveTask, small: Job, engine: Engine, world: World) -> TrainingRecord:
    """Runs the proof's job `small` in two parts, the second one from the checkpoint of the first.

    Rank 0 writes what the files of the run hold: the saved weights, the last checkpoint, the predictions.
    """
    folder, cut, asked = Path(plan.out) / "life", life_steps(training, len(small.phases)), training.life
    weights, init = folder / "weights.safetensors", folder / f"init{world.rank}.safetensors"
    _write_init(small, init)
    part = RunTask(
        str(weights),
        init=str(init),
        every=0,
        every_steps=cut.every if small.evaluation is not None else 0,
        best=asked.best,
        checkpoint_every=Interval(cut.checkpoint_every, "steps"),
        keep=1,
        resume="never",
        stop_after=cut.stop,
        check_replicas=0,  # the proof compares them, and names what parts them
    )
    plan = replace(plan, engine_settings=training.engine_settings)
    first = run_training(plan, part, _with_data_as_built(plan, training, small), engine, world)
    if world.rank == 0 and asked.best:
        # The best weights are taken from the checkpoint, as on another machine, which has no such file.
        replace_by(weights, lambda file: file.write(init.read_bytes()))
    # It stops after its last step, so that no stop of the whole process is asked for.
    resumed = replace(part, resume="auto", best=asked.best_after, stop_after=cut.steps)
    second = run_training(plan, resumed, _with_data_as_built(plan, training, small), engine, world)
    predictions = folder / "predictions.npy"
    if asked.predictions and weights.exists():
        evaluate_weights(plan, EvaluateTask(str(weights), "", str(predictions)), small, engine, world)
    record = replace(
        second,
        losses=first.losses + second.losses,
        step_of=first.step_of + second.step_of,
        weight_of=first.weight_of + second.weight_of,
        restart=RestartRecord(len(first.step_s), second.resumed_from, second.resumed_from + len(second.step_s)),
    )
    if world.rank == 0:
        saved_at = _write_tensors(plan, training.name, weights, predictions)
        assert record.restart
        record = replace(record, restart=replace(record.restart, saved_at=saved_at))
        remove_made_folder(folder)
    return record


def _with_data_as_built(plan: Plan, training: ProveTask, small: Job) -> Job:
    """Returns the job with datasets that no training has moved to another epoch: a run begins in a new process, and
    a restarted one looks whether its data are those of the checkpoint."""
    datasets = [dataset for dataset in (small.train, small.evaluation) if dataset is not None]
    if not any(is_stream(inner) or hasattr(inner, "set_epoch") for dataset in datasets for inner in nested(dataset)):
        return small
    built = proof_job(build(plan.job, plan.settings), training)
    return replace(small, train=built.train, evaluation=built.evaluation)


def _write_init(small: Job, file: Path) -> None:
    """Writes the weights to begin with: the model's own floating-point tensors, each times INIT."""
    from safetensors.torch import save_file  # not by the code of a run, which the proof is of

    make_folder(file.parent)
    state = {name: value.cpu() for name, value in small.model().state_dict().items() if isinstance(value, Tensor)}
    # Cloned, because the format does not allow two names for one tensor (tied weights).
    save_file({n: (t * INIT if t.is_floating_point() else t.clone()).contiguous() for n, t in state.items()}, file)


def _write_tensors(plan: Plan, name: str, weights: Path, predictions: Path) -> int:
    """Writes the tensors of a run's files for the judge. Returns the steps before its last checkpoint."""
    from safetensors.torch import load_file

    def write(kind: str, state: StateDict) -> None:
        write_state(Path(plan.out), 0, f"{name}{kind}", state)

    checkpoint = newest(weights.parent / FOLDER, say)
    assert checkpoint
    saved = Saved(checkpoint)
    tree = saved.state
    model = {key: saved.tensor(value) for key, value in tree["model"].items() if isinstance(value, Stored)}
    average = {key: saved.tensor(value) for key, value in tree.get("ema", {}).items()}
    for rank, of_rank in tree["ranks"].items():
        write(f".buffers{rank}", {key: saved.tensor(value) for key, value in of_rank["buffers"].items()})
    write("", {**model, **average})
    write(".raw", model if average else {})
    write(".saved", load_file(weights) if weights.exists() else {})
    write(".outputs", {"outputs": torch.from_numpy(np.load(predictions))} if predictions.exists() else {})
    return int(saved.manifest.step)
