"""Inspects a job before a launch: its sizes, and what no engine can train."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from samestep.data.loader import most_workers, workers_of
from samestep.data.schedule import check_epochs, schedule_of
from samestep.errors import UserError
from samestep.job import Job
from samestep.message import Message, message
from samestep.rank.digests import state_digests
from samestep.rank.evaluate import chunk_rows
from samestep.rank.job_errors import raised_on_rows
from samestep.rank.weights import pretrained
from samestep.records.inspection import (
    DataFacts,
    EvaluationFacts,
    JobFacts,
    ModelFacts,
    OptimizerFacts,
    ProofFacts,
    Question,
    Refusals,
)
from samestep.records.plan import SGD_LR, ProveTask
from samestep.tasks.inspect.dry_run import (
    DryEvaluation,
    DryStep,
    build_model,
    dry_evaluation,
    dry_step,
    varying_calls,
)
from samestep.tasks.inspect.engines import NO_DEMANDS, EngineDemands
from samestep.tasks.inspect.extremes import Extremes, find_extremes
from samestep.tasks.inspect.load import build, find, innermost, settings_of
from samestep.tasks.inspect.refusals import TrainedSizes, try_to_divide
from samestep.tasks.inspect.second_sizes import SecondSizes
from samestep.tasks.proof_job import rows_of_proof

MOST_EXTREMES = 64  # rows that a plan names
Result = TypeVar("Result")


def inspect_job(question: Question, replicas: int, device: str, engines: EngineDemands = NO_DEMANDS) -> JobFacts:
    """Returns the sizes and properties of a question's job, and what cannot train it.

    replicas: on all machines. device: on which a few rows are tried. engines: those of the question. Raises UserError
    for a job that cannot be trained or proven.
    """
    assert question.job
    function, job = find(question.job), build(question.job, question.settings, compiled=False)
    model = build_model(job)
    engines.check_model(model)
    _check_model(job, model, question.job)
    check_epochs(job)
    dry = _dry_run(job, model, replicas, device, engines.least_rows)
    model_facts = _model_facts(model, dry.step)
    extremes = find_extremes(job) if question.proves else Extremes()
    sizes = TrainedSizes(job, device, _numbers_of_replicas(question, replicas, engines), engines.in_parts)
    training = _training_of_proof(question, replicas, sizes, dry, extremes)
    proven = training if question.proves else None
    divided, undivided = try_to_divide(job, engines.divides)
    refusals = Refusals(
        sizes.refused_replicas(proven),
        undivided=sizes.refused_engines(proven) | undivided,
        varying_calls=varying_calls(job, engines.units, replicas, device),
    )
    second = SecondSizes(job, device, training, dry.step.forward_flop, model_facts.parameters, engines.units)
    return JobFacts(
        settings=settings_of(function),
        chosen={name: str(value) for name, value in question.settings.items()},
        source=_source_digest(question.job, function),
        sync_batchnorm=job.sync_batchnorm,
        gather_outputs=job.gather_outputs,
        carry_state=job.carry_state,
        data=_data_facts(job, sizes.replicas),
        model=model_facts,
        optimizer=_optimizer_facts(job),
        evaluation=_evaluation_facts(job, dry.evaluation),
        proof=ProofFacts(
            steps=training.steps,
            rows=training.rows,
            costly=dry.costly,
            extremes=training.extremes,
            rows_looked_at=extremes.looked_at,
            second=second.whole(0 if question.mesh else question.also),
            second_meshes=second.on_meshes(engines.other_meshes, refusals.undivided),
        ),
        refusals=refusals,
        divided=divided,
    )


def _numbers_of_replicas(question: Question, replicas: int, engines: EngineDemands) -> list[int]:
    """Returns on how many replicas the job may be trained: on one, all, those of fewer machines, and those of engines
    whose ranks are arranged in a mesh."""
    of_machine = replicas // question.machines
    fewer = [of_machine * machines for machines in range(question.least or question.machines, question.machines)]
    return sorted({1, replicas, *fewer, *engines.replicas})


@dataclass(frozen=True)
class DryRun:
    """What a training and an evaluation of a few rows showed."""

    step: DryStep
    """What the training showed."""

    evaluation: DryEvaluation
    """What the evaluation showed."""

    proof_rows: int
    """The rows of a step of the proof, as ProofFacts.rows."""

    costly: bool
    """Whether such a step takes long."""


def _dry_run(job: Job, model: nn.Module, replicas: int, device: str, least_rows: int) -> DryRun:
    """Trains and evaluates a few rows. least_rows: of a step of the proof.

    Its steps have the job's global batch where no batch may have a size that the job never has.
    """
    # BatchNorm takes no micro-batch of one row: not of the proof's last batch either, which is half as large.
    least_rows *= 2 if _batch_layers(model) else 1
    step, own_sizes = _dry_step(job, replicas, device)
    rows, costly = rows_of_proof(job, replicas, step.forward_flop, _count_parameters(model), least_rows)
    evaluation, own_chunks = _dry_evaluation(job, device)
    return DryRun(step, evaluation, job.global_batch if own_chunks or own_sizes else rows, costly)


def _dry_step(job: Job, replicas: int, device: str) -> tuple[DryStep, bool]:
    """Returns what a few rows show, and whether the job refuses these and takes the rows that a rank really gets, as
    one does that cuts a batch into equal parts."""
    return _at_own_size(
        lambda: dry_step(job, schedule_of(job, 1), build_model(job), device),
        lambda: dry_step(job, schedule_of(job, replicas), build_model(job), device, job.global_batch),
    )


def _dry_evaluation(job: Job, device: str) -> tuple[DryEvaluation, bool]:
    """Evaluates a few rows. Returns what they showed, and whether the job refuses these rows and takes as many as an
    evaluation has at once."""
    rows = chunk_rows(job)
    few, own_size = partial(dry_evaluation, job, build_model(job), device), (rows, rows)
    return _at_own_size(few, lambda: dry_evaluation(job, build_model(job), device, *own_size), is_evaluation=True)


def _at_own_size(
    few: Callable[[], Result], own_size: Callable[[], Result], *, is_evaluation: bool = False
) -> tuple[Result, bool]:
    """Returns what `few` returns, or what `own_size` does where a function of the job's fails on a few rows alone; and
    whether it did. Raises the UserError of both, or, where they fail in two ways, that of `own_size`."""
    try:
        return few(), False
    except UserError as error:
        if not raised_on_rows(error.message):
            raise
        first = error
    try:
        return own_size(), True
    except UserError as error:
        if _without_rows(first.message) == _without_rows(error.message):
            raise first from error
        raise UserError(message("evaluation_rows_refused", why=error.message)) if is_evaluation else error from error


def _without_rows(said: Message) -> Message:
    """Returns a message without the number of rows that it is about."""
    fields = {
        name: _without_rows(value) if isinstance(value, Message) else value for name, value in said.fields.items()
    }
    return Message(said.id, {**fields, "rows": None})


def _training_of_proof(
    question: Question, replicas: int, sizes: TrainedSizes, dry: DryRun, extremes: Extremes
) -> ProveTask:
    """Returns a training of the proof; of the job's own batches, where others alone would be refused."""
    steps = question.steps or _proof_steps(sizes.job, dry.costly)
    unlike = extremes.rows[:MOST_EXTREMES]
    training = ProveTask("sgd", steps, "float32", replicas, SGD_LR, rows=dry.proof_rows, extremes=unlike)
    if question.proves and sizes.are_refused_in_the_proof_alone(training):
        training = replace(training, rows=sizes.job.global_batch)
    return training


def _proof_steps(job: Job, costly: bool) -> int:
    """Returns the steps of a training of the proof. costly: whether a step takes long."""
    long = costly or job.optimizer.needs_closure  # which computes the loss many times in a step
    return 4 * max(1, len(job.phases)) if long or job.phases else 8  # 4 rounds of all phases


def _data_facts(job: Job, numbers_of_replicas: Sequence[int]) -> DataFacts:
    """Returns what is known of the training data."""
    return DataFacts(
        rows=len(job.train),
        global_batch=job.global_batch,
        micro_batches={replicas: schedule_of(job, replicas).micro_batches for replicas in numbers_of_replicas},
        steps_per_epoch=schedule_of(job, 1).steps_per_epoch,
        last=job.last,
        workers=workers_of(job),
        most_workers=most_workers(job),
        prefetch=job.prefetch,
    )


def _model_facts(model: nn.Module, step: DryStep) -> ModelFacts:
    """Returns what is known of the model. step: a dry step of it."""
    return ModelFacts(
        parameters=_count_parameters(model),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        batch_layers=_batch_layers(model),
        random_layers=_layers(model, nn.modules.dropout._DropoutNd, lambda layer: layer.p > 0),
        unused=tuple(step.unused),
        scalars=tuple(name for name, parameter in model.named_parameters() if parameter.dim() == 0),
        pretrained=tuple(pretrained(model)),
        row_bytes=step.row_bytes,
        row_s=step.row_s,
    )


def _count_parameters(model: nn.Module) -> int:
    """Counts the elements of all the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _optimizer_facts(job: Job) -> OptimizerFacts:
    """Returns what is known of the optimizer, or of those of all phases."""
    return OptimizerFacts(
        name=job.of_phases()[0].optimizer.cls.__name__,
        phases={phase.name: phase.optimizer.cls.__name__ for phase in job.phases},
        needs_closure=job.optimizer.needs_closure,
    )


def _evaluation_facts(job: Job, dry: DryEvaluation) -> EvaluationFacts:
    """Returns what is known of the evaluation. dry: that of a few rows."""
    if job.evaluation is None:
        return EvaluationFacts()
    return EvaluationFacts(len(job.evaluation), _metrics(job, dry.has_loss), dry.draws)


def _metrics(job: Job, has_loss: bool) -> dict[str, Literal["min", "max"]]:
    """Returns the job's metrics, and the loss where it has one -> whether a lower or a higher value is better."""
    better = {name: _better(metric) for name, metric in job.metrics.items()}
    return {"loss": "min", **better} if has_loss else better


def _check_model(job: Job, model: nn.Module, target: str) -> None:
    """Raises UserError for a model without parameters to train, one that differs from call to call, or one that is
    not built anew; and for an evaluation whose rows weigh nothing."""
    _check_evaluation_weights(job)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(message("model_has_no_parameters_to_train", job=target))
    again = build_model(job)
    held = {id(parameter) for parameter in again.parameters()}
    if names := [name for name, p in model.named_parameters() if p.requires_grad and id(p) in held]:
        raise UserError(message("model_is_not_built_anew", job=target, parameter=names[0]))
    if state_digests(model) != state_digests(again):
        raise UserError(message("model_differs_from_call_to_call", job=target))


def _better(metric: Any) -> Literal["min", "max"]:
    """Returns whether a higher ('max') or a lower value ('min') of a metric is better. torchmetrics say it."""
    return "min" if getattr(metric, "higher_is_better", True) is False else "max"


def _layers(
    model: nn.Module, kind: type[nn.Module], acts: Callable[[Any], bool] = lambda layer: True
) -> tuple[str, ...]:
    """Returns the names of a model's layers of a kind that act: dropout at p=0 draws nothing."""
    modules = model.named_modules()
    return tuple(name or type(layer).__name__ for name, layer in modules if isinstance(layer, kind) and acts(layer))


def _batch_layers(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of a model's BatchNorm layers."""
    return _layers(model, nn.modules.batchnorm._BatchNorm)


def _source_digest(target: str, function: Callable[..., Any]) -> str:
    """Returns a digest of the job's file and of the modules beside it that it imports."""
    if target.endswith(".pkl"):  # a function in a notebook: its file name changes each time the cell runs
        try:
            text = inspect.getsource(function).encode()
        except (OSError, TypeError):
            text = Path(target).read_bytes()
        return hashlib.blake2b(text, digest_size=8).hexdigest()
    home = Path(inspect.getfile(innermost(function))).resolve().parent
    paths = {os.path.split(str(m.__file__)) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    known: dict[str, str] = {}
    resolved = {folder: Path(_real_path(os.path.abspath(folder), known)) for folder, _ in paths}
    library = Path(sysconfig.get_path("stdlib")).resolve()  # Python's own, where a job lies above it
    near = {
        folder for folder in resolved.values() if folder.is_relative_to(home) and not folder.is_relative_to(library)
    }
    beside = {resolved[folder] / name for folder, name in paths if resolved[folder] in near}
    state = hashlib.blake2b(digest_size=8)
    for file in sorted(f for f in beside if not {"site-packages", "dist-packages"} & {*f.parts} and f.is_file()):
        state.update(file.read_bytes())
    return state.hexdigest()


def _real_path(folder: str, known: dict[str, str]) -> str:
    """os.path.realpath of an absolute path; looks at each part that many paths share once. known: path -> real path."""
    if folder not in known:
        parent, name = os.path.split(folder)
        path = os.path.join(_real_path(parent, known), name) if name else folder
        known[folder] = os.path.realpath(path) if os.path.islink(path) else path
    return known[folder]


def _check_evaluation_weights(job: Job) -> None:
    weigh, evaluation = job.evaluation_weight, job.evaluation
    if weigh and evaluation is not None and not any(weigh(index) > 0 for index in range(len(evaluation))):
        raise UserError(message("evaluation_rows_weigh_nothing"))
