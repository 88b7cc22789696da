"""Tries a job before a launch on a few rows, to refuse what no engine can train: a step, forward and backward; an
evaluation; and how often a forward pass calls the modules that an engine gathers."""

from __future__ import annotations

import inspect
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from samestep.data.loader import KeyedRandom, Rows, fetch, to_device
from samestep.data.schedule import Schedule, schedule_of
from samestep.errors import UserError, not_a_scalar, not_per_row
from samestep.job import Batch, Job, MicroBatch, counts_by_itself, output_and_state, reads_batch
from samestep.job.walk import leaves_of, without_graph
from samestep.message import message
from samestep.rank.evaluate import count_metric, evaluate
from samestep.rank.job_errors import raising
from samestep.rank.step import ActivePhase, default_generator, detached, is_one_row_error
from samestep.records.inspection import VaryingCalls
from samestep.reference.replica_state import output_and_loss
from samestep.world import World
from samestep.world.foreign_code import as_exceptions, error_line

ROWS = 4
PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, int, float, type(None))


def build_model(job: Job) -> nn.Module:
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


class NoModules(ModuleTracker):
    """Counts operations without their modules: torch tracks these by hooks, which fail where a forward computes a
    gradient itself, as of a gradient penalty."""

    def __enter__(self) -> NoModules:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class DryStep:
    """What one forward and backward pass over a small batch showed.

    unused: the parameters without a gradient. forward_flop: the floating-point operations of a row's forward pass, 0
    where they cannot be counted. row_bytes: of the outputs of the model's layers, a row. row_s: the seconds of its
    forward and backward passes, roughly.
    """

    unused: list[str]
    forward_flop: float
    row_bytes: float = 0.0
    row_s: float = 0.0


def dry_step(
    job: Job, schedule: Schedule, model: nn.Module, device: str, most: int = ROWS, *, at: tuple[int, int] = (0, 0)
) -> DryStep:
    """Trains `model` on one small batch, of at most `most` rows, up to the gradients.

    at: the rank and the step in its epoch whose rows they are. The model's gradients and buffers change. Raises
    UserError where the job's functions raise, with the line in the job's code, or return what cannot be trained.
    """
    _check_optimizer(job, model)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(message("parameter_is_complex", parameter=name))
    micro_batch = schedule.step(at[0], 0, at[1])[0]
    rows = min(micro_batch.rows, most)
    micro_batch = replace(micro_batch, indices=micro_batch.indices[:rows], rows=rows)
    model = model.to(device)
    data: Any = raising("reading", lambda: Rows(job)[micro_batch][1], micro_batch.rows)
    for leaf in leaves_of(data):
        if not isinstance(leaf, PLAIN):
            raise UserError(message("batch_holds_other_objects", type=type(leaf).__name__))
        if isinstance(leaf, Tensor):
            check_dense(leaf)
    active, flop, saved_bytes = ActivePhase(job.phases, model), 0.0, 0
    sizes, began = _output_sizes(model), time.perf_counter()
    try:
        for number, turn in enumerate(job.of_phases()):
            active.activate(number)
            sizes.clear()  # a step is one phase's
            flop += _forward_backward(turn, model, Batch(to_device(data, device), replace(micro_batch, phase=number)))
            saved_bytes = max(saved_bytes, sum(sizes))
    except UserError as error:
        if is_one_row_error(error):
            return DryStep([], 0.0)  # inspect_job checks which ranks get one row
        if not job.phases:
            raise
        raise UserError(message("refused_in_a_phase", phase=job.phases[number].name, why=error.message)) from error
    active.end()
    seconds = (time.perf_counter() - began) / len(job.of_phases())
    rows = max(1, rows)
    return DryStep(_without_gradient(model), flop / rows, saved_bytes / rows, seconds / rows)


def _forward_backward(job: Job, model: nn.Module, batch: Batch) -> float:
    """Computes the gradients of one batch. Returns the floating-point operations of the forward pass."""
    micro_batch, called = batch.micro_batch, list[bool]()
    model.register_forward_hook(lambda *_: called.append(True))
    flop: float
    returned, flop = raising("forward", lambda: counted_flop(lambda: job.forward(model, batch)), micro_batch.rows)
    if not called:
        raise UserError(message("forward_does_not_call_the_model"))
    output, state = output_and_state(returned) if job.carry_state else (returned, None)
    if job.gather_outputs:
        _check_gathered(output, batch.data, micro_batch.rows)
    loss = raising("criterion", lambda: job.criterion(output, batch), micro_batch.rows)
    if not isinstance(loss, Tensor):
        raise UserError(message("criterion_returns_no_tensor", type=type(loss).__name__))
    if loss.dim() != 0:
        raise not_a_scalar(list(loss.shape))
    if not loss.requires_grad:
        raise UserError(message("loss_depends_on_no_parameter"))
    raising("backward", loss.backward, micro_batch.rows)
    if job.carry_state:
        _check_carried(job, model, batch, state)
    return flop


def counted_flop(call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns what `call` returns, and its floating-point operations; 0 where it cannot be called while they are
    counted."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    try:
        with counter:
            returned = call()
    except Exception:  # the counter's, or one that the call raises again without it
        return call(), 0.0
    return returned, float(counter.get_total_flops())


def check_dense(tensor: Tensor, name: str = "") -> None:
    """Raises UserError for a sparse tensor. Engines cannot broadcast it, safetensors cannot hold it.

    name: of a model's tensor; '' for one of a batch.
    """
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        if name:
            raise UserError(message("tensor_of_the_model_is_sparse", name=name, layout=layout))
        raise UserError(message("tensor_of_a_batch_is_sparse", layout=layout))


def _output_sizes(model: nn.Module) -> list[int]:
    """Returns a list to which each layer of `model` adds its outputs' bytes when it is called."""
    sizes: list[int] = []

    def add(layer: nn.Module, inputs: Any, output: Any) -> None:
        sizes.extend(leaf.nbytes for leaf in leaves_of(output) if isinstance(leaf, Tensor))

    for layer in model.modules():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(add)
    return sizes


def _check_carried(job: Job, model: nn.Module, batch: Batch, state: Any) -> None:
    """Raises UserError for a state without tensors, and where forward does not take the state that it has returned."""
    if not any(isinstance(leaf, Tensor) for leaf in leaves_of(state)):
        raise UserError(message("carried_state_holds_no_tensor"))
    continued = replace(batch, state=detached(state))
    raising("forward with batch.state", lambda: without_graph(job.forward, model, continued), batch.micro_batch.rows)


def _check_gathered(output: Any, data: Any, rows: int) -> None:
    """Raises UserError for an output without rows, and for what Job(gather_outputs=True) cannot gather."""
    for leaf in leaves_of((output, data)):
        if not isinstance(leaf, Tensor | int | float | type(None)):
            raise UserError(message("gathered_output_holds_other_objects", type=type(leaf).__name__))
    if not any(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows for leaf in leaves_of(output)):
        raise UserError(message("gathered_output_has_no_rows"))


def _without_gradient(model: nn.Module) -> list[str]:
    """Returns the names of the parameters without a gradient. Raises UserError for a sparse gradient."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UserError(message("gradient_is_sparse", parameter=name))
    return [name for name, parameter in trained if parameter.grad is None]


def _check_optimizer(job: Job, model: nn.Module) -> None:
    """Raises UserError for an optimizer that cannot be built, or has other weights for evaluation, and for a scheduler
    that needs a metric."""
    for recipe in (turn.optimizer for turn in job.of_phases()):
        if hasattr(recipe.cls, "train") and hasattr(recipe.cls, "eval"):
            raise UserError(message("optimizer_has_modes", optimizer=recipe.cls.__name__))
    optimizer = raising("optimizer", lambda: job.optimizer.build(model), None)
    if inspect.unwrap(type(optimizer).step) is torch.optim.Optimizer.step:  # torch wraps that of each class
        raise UserError(message("optimizer_has_no_step", optimizer=type(optimizer).__name__))
    parameters = inspect.signature(optimizer.step).parameters
    if (
        not type(optimizer).__module__.startswith("torch.")
        and "closure" in parameters
        and not job.optimizer.needs_closure
    ):
        try:
            optimizer.step()  # nothing has a gradient yet: it moves no weight
        except Exception as error:
            if re.search(r"closure|'NoneType' object is not callable", str(error)):
                name = type(optimizer).__name__
                raise UserError(message("optimizer_needs_an_undeclared_closure", optimizer=name)) from error
    if job.scheduler is None:
        return
    make = job.scheduler.make
    scheduler = raising("scheduler", lambda: make(optimizer), None)
    if "metrics" in inspect.signature(scheduler.step).parameters and job.scheduler.every != "evaluation":
        raise UserError(message("scheduler_needs_a_metric", scheduler=type(scheduler).__name__))


EVALUATION_ROWS = 16


@dataclass(frozen=True)
class DryEvaluation:
    """What an evaluation of a few rows showed. draws: what draws random numbers: 'dataset', 'collate', 'model'.
    has_loss: whether the criterion returns a loss there."""

    draws: tuple[str, ...] = ()
    has_loss: bool = True


def dry_evaluation(
    job: Job, model: nn.Module, device: str, few: int = ROWS, at_once: int = EVALUATION_ROWS
) -> DryEvaluation:
    """Evaluates `model` on two small batches of the job's evaluation. Raises UserError as dry_step does.

    few: the rows that metrics are called with. at_once: those of a batch.
    """
    if job.evaluation is None:
        return DryEvaluation()
    subset: Any = Subset(job.evaluation, range(min(2 * at_once, len(job.evaluation))))  # type: ignore[arg-type]
    small = replace(job, evaluation=subset, micro_batch=at_once, gather_outputs=False, workers=0)
    rows = replace(small.evaluated(), global_batch=1, weight=None, shuffle=False)
    draws = _draws(rows, model, device, few)
    _check_metrics(rows, model, device, few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that expect more rows
        found = raising("evaluation", lambda: evaluate(small, model.to(device), World(devices=(device,))), at_once)
    if not found.sums:
        raise UserError(message("evaluation_measures_nothing"))
    has_loss = "loss" in found.sums
    if not has_loss and job.scheduler and job.scheduler.every == "evaluation" and job.scheduler.metric == "loss":
        raise UserError(message("scheduler_steps_by_a_missing_loss", metric=next(iter(job.metrics))))
    return DryEvaluation(draws, has_loss)


def _draws(job: Job, model: nn.Module, device: str, few: int) -> tuple[str, ...]:
    """Returns what draws random numbers. job: its training data are the evaluation's."""
    rows = list(range(min(few, len(job.train))))
    micro_batch = replace(schedule_of(job, 1).step(0, 0, 0)[0], indices=np.array(rows), rows=len(rows))
    model, stream = model.to(device).eval(), default_generator(device)
    read, before = Rows(job), stream.get_state()
    keyed = {what: KeyedRandom() for what in ("dataset", "collate", "model")}
    samples = raising("reading", lambda: keyed["dataset"](lambda: fetch(read.dataset, rows)), len(rows))
    data = raising("reading", lambda: keyed["collate"](lambda: read.collate(samples)), len(rows))
    batch = Batch(to_device(data, device), micro_batch)
    raising("forward", lambda: keyed["model"](lambda: without_graph(job.output, model, batch)), len(rows))
    on_gpu = not torch.equal(before, stream.get_state())
    return tuple(what for what in keyed if keyed[what].drawn or (on_gpu and what == "model"))


def _check_metrics(job: Job, model: nn.Module, device: str, few: int) -> None:
    """Calls each metric on some rows of `job.train`, which the caller has set to the evaluation's."""
    micro_batch = replace(schedule_of(job, 1), global_batch=min(few, len(job.train))).step(0, 0, 0)[0]
    model = model.to(device).eval()
    batch = Batch(
        to_device(raising("reading", lambda: Rows(job)[micro_batch][1], micro_batch.rows), device), micro_batch
    )
    with torch.no_grad():
        output = raising("forward", lambda: without_graph(job.output, model, batch), micro_batch.rows)
        try:
            raising("criterion", lambda: without_graph(output_and_loss, job, model, batch), micro_batch.rows)
        except UserError as error:
            kind, name = _kind_of(output), type(output).__name__
            raise UserError(
                message("criterion_fails_in_the_evaluation", output=kind, type=name, why=error.message)
            ) from error
        for name, metric in job.metrics.items():
            if counts_by_itself(metric):
                if batch.targets is None and not reads_batch(metric):
                    raise UserError(message("metric_gets_no_targets", metric=name))
                raising(f"metric '{name}'", lambda metric=metric: count_metric(metric, output, batch), micro_batch.rows)
                continue
            values = raising(f"metric '{name}'", lambda metric=metric: metric(output, batch), micro_batch.rows)
            if not isinstance(values, Tensor) or list(values.shape) != [micro_batch.rows]:
                raise not_per_row(name, list(getattr(values, "shape", [])), micro_batch.rows)


def _kind_of(output: Any) -> str:
    """Names what forward returns, for a sentence: 'a list of dict'."""
    inner = f" of {type(output[0]).__name__}" if isinstance(output, list | tuple) and output else ""
    return f"a {type(output).__name__}{inner}"


MOST_ROWS = 16  # of a rank's own part, which is tried where it is no larger

Units = Callable[[nn.Module], list[nn.Module]]


def varying_calls(job: Job, units: Mapping[str, Units], replicas: int, device: str) -> dict[str, VaryingCalls]:
    """Returns the engines -> their first unit that not every forward pass calls as often.

    units: engine -> the modules that its ranks gather when they are called. Nothing is said of a job whose functions
    raise on these rows: dry_step names the error.
    """
    found = {}
    for engine, units_of in units.items():
        try:
            net = build_model(job).to(device)
            if unit := _varying(job, net, units_of(net), replicas, device):
                found[engine] = unit
        except Exception:
            continue
    return found


def _varying(job: Job, model: nn.Module, units: list[nn.Module], replicas: int, device: str) -> VaryingCalls | None:
    """Compares the calls of each unit, first over batches of as many rows, then over others."""
    if not units:
        return None
    calls: Counter[nn.Module] = Counter()
    for unit in units:
        unit.register_forward_pre_hook(lambda module, inputs: calls.update([module]))
    names = {module: name for name, module in model.named_modules()}
    read, first = Rows(job), None
    for micro_batch in _micro_batches(job, replicas):
        calls.clear()
        data = to_device(read[micro_batch][1], device)
        for number, turn in enumerate(job.of_phases()):
            batch: Any = Batch(data, replace(micro_batch, phase=number))
            without_graph(turn.forward, model, batch)
        rows, counts = micro_batch.rows, [calls[unit] for unit in units]
        first = first or (rows, counts)
        for unit, count, before in zip(units, counts, first[1]):
            if count != before:
                return VaryingCalls(names[unit], "data" if rows == first[0] else "rows")
    return None


def _micro_batches(job: Job, replicas: int) -> list[MicroBatch]:
    """Returns batches of as many rows, the first twice, as a forward may draw; one with fewer; the ranks' last."""
    alone, ranks = schedule_of(job, 1), schedule_of(job, replicas)
    last = alone.steps_per_epoch - 1
    few = [_cut(alone.step(0, 0, step)[0], ROWS) for step in (0, 0, min(1, last))]
    micro_batches = [ranks.step(rank, 0, last)[0] for rank in (0, replicas - 1)]
    return [
        *few,
        _cut(few[0], max(1, few[0].rows - 1)),
        *(micro_batch for micro_batch in micro_batches if 0 < micro_batch.rows <= MOST_ROWS),
    ]


def _cut(micro_batch: MicroBatch, most: int) -> MicroBatch:
    rows = min(micro_batch.rows, most)
    return replace(micro_batch, indices=micro_batch.indices[:rows], rows=rows)
