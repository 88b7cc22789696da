"""Inspects a job before a launch: its sizes, and what no engine can train."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from samestep.data.loader import Rows, most_workers, workers_of
from samestep.data.schedule import Schedule, check_epochs, schedule_of
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.rank.digests import state_digests
from samestep.rank.evaluate import chunk_rows
from samestep.rank.job_errors import raised_on_rows
from samestep.rank.step import is_one_row_error, one_row_message
from samestep.rank.weights import pretrained
from samestep.records.inspection import EngineFacts, JobFacts, SecondSize
from samestep.records.plan import SGD_LR, ProveTask, second_size
from samestep.tasks.inspect.dry_run import (
    DryEvaluation,
    DryStep,
    Units,
    check_dense,
    dry_evaluation,
    dry_step,
    varying_calls,
)
from samestep.tasks.inspect.engines import Divides
from samestep.tasks.inspect.extremes import Extremes, find_extremes
from samestep.tasks.inspect.load import build, find, innermost, settings_of
from samestep.tasks.proof_job import proof_job, rows_of_proof
from samestep.world.foreign_code import as_exceptions, error_line

MOST_EXTREMES = 64  # rows that a plan names
Result = TypeVar("Result")


def inspect_job(
    target: str,
    settings: Mapping[str, str],
    replicas: int,
    steps: int | None,
    device: str,
    check: Callable[[nn.Module], None] = lambda model: None,
    fewer: Sequence[int] = (),
    units: Mapping[str, Units] = MappingProxyType({}),
    also: int | None = 0,
    proves: bool = True,
    dividing: Mapping[str, Divides] = MappingProxyType({}),
    least_rows: int = 0,
    in_parts: Mapping[str, Layout] = MappingProxyType({}),
    on_other_meshes: Mapping[str, Sequence[tuple[EngineFacts, Divides | None]]] = MappingProxyType({}),
) -> JobFacts:
    """Returns a job's settings and sizes, and what its layers refuse, with 1 and with `replicas` replicas.

    fewer: other numbers of replicas. steps: of the proof; None: 8, or 4 where a step takes long. check: called with the
    model. units: engine -> what its ranks gather. also, proves: as of Question. dividing: engine -> what divides the
    model. least_rows: of a step of the proof. in_parts: engine -> its layout, where its steps have micro-batches of its
    own. on_other_meshes: engine -> its facts on meshes that are tried for a second proof, and what divides the model
    there. Raises UserError for a job that cannot be trained or proven.
    """
    function, job = find(target), build(target, settings, compiled=False)
    model = _model(job)
    check(model)
    _check_model(job, model, target)
    check_epochs(job)
    count = sum(p.numel() for p in model.parameters())
    # BatchNorm takes no micro-batch of one row: not of the proof's last batch either, which is half as large.
    least_rows *= 2 if _layers(model, nn.modules.batchnorm._BatchNorm) else 1
    dry, evaluation, proof_rows, costly = _tried(job, replicas, device, count, least_rows)
    steps = steps or _proof_steps(job, costly)
    extremes = find_extremes(job) if proves else Extremes()
    unlike = extremes.rows[:MOST_EXTREMES]
    sizes = sorted({1, replicas, *fewer})
    training = ProveTask("sgd", steps, "float32", replicas, SGD_LR, rows=proof_rows, extremes=unlike)
    if proves and _is_refused_in_the_proof_alone(job, training, device, sizes, in_parts):
        training = replace(training, rows=job.global_batch)
    divided, undivided = _divided(job, dividing)
    refused = {n: _refusal_of(job, training if proves else None, device, n) for n in sizes}
    undivided = _refused_in_parts(job, training if proves else None, device, in_parts) | undivided
    second_sizes = SecondSizes(job, device, training, dry.forward_flop, count, units)
    return JobFacts(
        settings=settings_of(function),
        chosen={name: str(value) for name, value in settings.items()},
        source=_source_digest(target, function),
        metrics={} if job.evaluation is None else _metrics(job, evaluation.has_loss),
        global_batch=job.global_batch,
        micro_batches={n: schedule_of(job, n).micro_batches for n in sizes},
        proof_steps=training.steps,
        proof_rows=training.rows,
        costly=costly,
        row_bytes=dry.row_bytes,
        row_s=dry.row_s,
        steps_per_epoch=schedule_of(job, 1).steps_per_epoch,
        epochs=job.epochs,
        parameters=count,
        optimizer=job.of_phases()[0].optimizer.cls.__name__,
        prefetch=job.prefetch,
        last=job.last,
        sync_batchnorm=job.sync_batchnorm,
        gather_outputs=job.gather_outputs,
        carry_state=job.carry_state,
        unused=tuple(dry.unused),
        phases={phase.name: phase.optimizer.cls.__name__ for phase in job.phases},
        needs_closure=job.optimizer.needs_closure,
        evaluation_draws=evaluation.draws,
        varying_calls=varying_calls(job, partial(_model, job), units, replicas, device),
        refused=refused,
        second=second_sizes.whole(also),
        second_meshes=second_sizes.on_meshes(on_other_meshes, undivided),
        extremes=unlike,
        rows_looked_at=extremes.looked_at,
        divided=divided,
        undivided=undivided,
        **_data_facts(job),
        **_model_facts(model),
    )


def _data_facts(job: Job) -> dict[str, Any]:
    """Returns the fields of JobFacts that are the datasets'."""
    return {
        "rows": len(job.train),
        "evaluation_rows": 0 if job.evaluation is None else len(job.evaluation),
        "workers": workers_of(job),
        "most_workers": most_workers(job),
    }


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """Returns the fields of JobFacts that are the model's."""
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "batch_layers": _layers(model, nn.modules.batchnorm._BatchNorm),
        "random_layers": _layers(model, nn.modules.dropout._DropoutNd, lambda layer: layer.p > 0),
        "scalars": tuple(name for name, parameter in model.named_parameters() if parameter.dim() == 0),
        "pretrained": tuple(pretrained(model)),
    }


def _divided(job: Job, dividing: Mapping[str, Divides]) -> tuple[dict[str, Message], dict[str, Message]]:
    """Returns engine -> how its ranks divide the model, and engine -> why they cannot."""
    divided, undivided = dict[str, Message](), dict[str, Message]()
    for engine, divides in dividing.items():
        try:
            if said := divides(job):
                divided[engine] = said
        except UserError as error:
            undivided[engine] = error.message
        except Exception as error:  # of one engine, which must not hide what the others say
            undivided[engine] = message("plan_cannot_be_tried", engine=engine, error=error_line(error))
    return divided, undivided


def _tried(
    job: Job, replicas: int, device: str, parameters: int, least: int
) -> tuple[DryStep, DryEvaluation, int, bool]:
    """Trains and evaluates a few rows. Returns what that showed, the rows of a step of the proof, and whether it is
    costly. These rows are the job's global batch where no batch may have a size that the job never has."""
    dry, own_sizes = _dry_step(job, replicas, device)
    rows, costly = rows_of_proof(job, replicas, dry.forward_flop, parameters, least)
    evaluation, own_chunks = _dry_evaluation(job, device)
    return dry, evaluation, job.global_batch if own_chunks or own_sizes else rows, costly


def _dry_step(job: Job, replicas: int, device: str) -> tuple[DryStep, bool]:
    """Returns what a few rows show, and whether the job refuses these and takes the rows that a rank really gets, as
    one does that cuts a batch into equal parts."""
    return _at_own_size(
        lambda: dry_step(job, schedule_of(job, 1), _model(job), device),
        lambda: dry_step(job, schedule_of(job, replicas), _model(job), device, job.global_batch),
    )


def _dry_evaluation(job: Job, device: str) -> tuple[DryEvaluation, bool]:
    """Evaluates a few rows. Returns what they showed, and whether the job refuses these rows and takes as many as an
    evaluation has at once."""
    rows = chunk_rows(job)
    few, own_size = partial(dry_evaluation, job, _model(job), device), (rows, rows)
    return _at_own_size(few, lambda: dry_evaluation(job, _model(job), device, *own_size), is_evaluation=True)


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


def _refused_size(job: Job, schedule: Schedule, device: str) -> Message | None:
    """Returns which rank's number of rows is refused by a job that takes only some; None where it takes all."""
    last, replicas = schedule.steps_per_epoch - 1, schedule.world_size
    for rank, step in ((0, 0), (replicas - 1, 0), (0, last), (replicas - 1, last)):
        try:
            dry_step(job, schedule, _model(job), device, job.global_batch, at=(rank, step))
        except UserError as error:
            helps = "last=drop" if step and job.last == "keep" else None
            return message("job_refuses_a_number_of_rows", step=step, rank=rank, why=error.message, setting=helps)
    return None


def _proof_steps(job: Job, costly: bool) -> int:
    """Returns the steps of a training of the proof. costly: whether a step takes long."""
    long = costly or job.optimizer.needs_closure  # which computes the loss many times in a step
    return 4 * max(1, len(job.phases)) if long or job.phases else 8  # 4 rounds of all phases


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
    again = _model(job)
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


def _model(job: Job) -> nn.Module:
    """Builds the job's model. Raises UserError when that fails, or when it has uninitialised (lazy) parameters."""
    try:
        with as_exceptions():
            model = job.model()
    except Exception as error:
        raise UserError(message("model_raised", error=error_line(error))) from error
    if not isinstance(model, nn.Module):
        raise UserError(message("model_is_no_module", type=type(model).__name__))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(parameter):
            raise UserError(message("parameter_is_lazy", parameter=name))
        check_dense(parameter, name)
    return model


def _check_evaluation_weights(job: Job) -> None:
    weigh, evaluation = job.evaluation_weight, job.evaluation
    if weigh and evaluation is not None and not any(weigh(index) > 0 for index in range(len(evaluation))):
        raise UserError(message("evaluation_rows_weigh_nothing"))


def _refusal_of(job: Job, proven: ProveTask | None, device: str, replicas: int, fewest: int = 1) -> Message | None:
    """Returns why the job, or the job of the proof, cannot be trained on so many replicas; None where it can.

    proven: a training of the proof; None: the job is not proven. fewest: micro-batches of a step, as of Schedule.
    """

    def schedule(trained: Job) -> Schedule:
        return replace(schedule_of(trained, replicas), fewest=fewest)

    own_sizes = proven is not None and proven.rows == job.global_batch
    why = _refused_size(job, schedule(job), device) if own_sizes else None
    why = why or _refusal(job, schedule(job))
    if why or proven is None:
        return why
    small = proof_job(job, proven)
    return _refusal(small, schedule(small))


def _refused_in_parts(
    job: Job, proven: ProveTask | None, device: str, in_parts: Mapping[str, Layout]
) -> dict[str, Message]:
    """Returns engine -> why its own micro-batches cannot be trained. proven: as of _refusal_of."""
    found = {
        engine: _refusal_of(job, proven, device, layout.replicas, layout.micro_batches)
        for engine, layout in in_parts.items()
    }
    return {engine: why for engine, why in found.items() if why}


def _is_refused_in_the_proof_alone(
    job: Job, training: ProveTask, device: str, sizes: Sequence[int], in_parts: Mapping[str, Layout]
) -> bool:
    """Returns whether the proof's last batch is refused, whose size the job's own batches do not have. sizes: numbers
    of replicas; in_parts: as of inspect_job."""
    if training.rows:  # of fewer rows than the job's batch, or of its own
        return False
    cuts = [(n, 1) for n in sizes] + [(layout.replicas, layout.micro_batches) for layout in in_parts.values()]
    refused = [(n, fewest) for n, fewest in cuts if _refusal_of(job, training, device, n, fewest)]
    return any(_refusal_of(job, None, device, n, fewest) is None for n, fewest in refused)


@dataclass(frozen=True)
class SecondSizes:
    """The second numbers of ranks of a job's proof. training: on the first one. forward_flop: of one row's forward
    pass. units: as of inspect_job."""

    job: Job
    device: str
    training: ProveTask
    forward_flop: float
    parameters: int
    units: Mapping[str, Units]

    def whole(self, also: int | None) -> SecondSize | None:
        """Returns the second number of ranks that are replicas; None where there is none. also: as of Question."""
        ranks = second_size(self.training.replicas, self.job.global_batch) if also is None else also
        return None if ranks in (0, self.training.replicas) else self._tried(Layout(ranks), ranks, self.units)

    def on_meshes(
        self, meshes: Mapping[str, Sequence[tuple[EngineFacts, Divides | None]]], undivided: Collection[str]
    ) -> dict[str, SecondSize]:
        """Returns engine -> its second mesh. meshes: as of inspect_job. undivided: what the first one refuses."""
        return {
            name: self.on_mesh(name, candidates)
            for name, candidates in meshes.items()
            if candidates and name not in undivided
        }

    def on_mesh(self, engine: str, candidates: Sequence[tuple[EngineFacts, Divides | None]]) -> SecondSize:
        """Returns the first mesh on which the job can be trained, or the first one, with the reason why it cannot."""
        units, first = {name: units for name, units in self.units.items() if name == engine}, None
        for facts, divides in candidates:
            assert facts.layout
            why = _divided(self.job, {engine: divides} if divides else {})[1].get(engine)
            if why:
                found = SecondSize(facts.processes, self.training.rows, {}, why, facts.mesh)
            else:
                found = replace(self._tried(facts.layout, facts.processes, units), mesh=facts.mesh)
            if found.refused is None:
                return found
            first = first or found
        assert first
        return first

    def _tried(self, layout: Layout, ranks: int, units: Mapping[str, Units]) -> SecondSize:
        """Returns a number of ranks, and whether the job can be trained on it."""
        job, rows, replicas, parts = self.job, self.training.rows, layout.replicas, layout.micro_batches
        if rows != job.global_batch:
            least = 2 * replicas * parts if parts > 1 else 0
            rows = rows_of_proof(job, ranks, self.forward_flop, self.parameters, least)[0]
        refused = _refusal_of(
            job, replace(self.training, replicas=ranks, rows=rows), self.device, replicas, fewest=parts
        )
        calls = varying_calls(job, partial(_model, job), units, replicas, self.device)
        return SecondSize(ranks, rows, calls, refused)


def _refusal(job: Job, schedule: Schedule) -> Message | None:
    """Returns why a layer refuses the smallest part of an epoch (one row, or none under SyncBatchNorm), or None."""
    synced = job.sync_batchnorm and schedule.world_size > 1
    rows, step, replica = schedule.smallest_micro_batch()
    if synced and (empty := schedule.without_rows()):
        return message("rank_without_rows_under_sync_batchnorm", step=empty[0], rank=empty[1])
    if rows > 1 or synced:
        return None
    micro_batch = next(p for p in schedule_of(job, 1).step(0, 0, 0))
    micro_batch = replace(micro_batch, indices=micro_batch.indices[:1], rows=1)
    _, data = Rows(job)[micro_batch]
    try:
        for number, turn in enumerate(job.of_phases()):
            turn.forward(job.model(), Batch(data, replace(micro_batch, phase=number)))
    except ValueError as error:
        if is_one_row_error(error):
            return one_row_message(step, replica, schedule.micro_batches, schedule.fewest)
    except Exception:
        return None  # other errors are raised again when it trains
    return None
