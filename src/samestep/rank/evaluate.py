"""Exact distributed evaluation, and what a training does with it: the best weights, patience, and the learning rate.

Each sample is evaluated once, and the digits are the same on any number of ranks: the rows are cut into chunks that do
not depend on the number of ranks, and the chunks' sums are added in the chunks' order. So neither the batch that a
kernel gets nor the order of additions changes with the number of ranks.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from samestep.data.fingerprint import gather_from_ranks
from samestep.data.loader import loaded
from samestep.data.schedule import cut
from samestep.errors import LoadingFailed, UserError, first_few, not_per_row, say
from samestep.job import Batch, Job, LRSchedule, MicroBatch, counts_by_itself, reads_batch
from samestep.job.walk import mapped_tensors, without_graph
from samestep.message import message
from samestep.rank.graceful_stop import Stop
from samestep.rank.hardware import is_out_of_memory
from samestep.rank.listeners import Listeners
from samestep.rank.parts import Part
from samestep.rank.step import batch_weight
from samestep.rank.threaded_group import active_turns, alike_on_ranks
from samestep.rank.weights import StateDict, save
from samestep.records.training_record import EvaluationRecord
from samestep.world import World
from samestep.world.heartbeat import EVALUATION, heartbeat

MAX_CHUNK_ROWS = 128  # rows at once; fewer where the job's micro-batch or global batch is smaller
BUCKET_BYTES = 25 << 20  # bytes of the weights in one message, which is in memory beside the model


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation over all ranks.

    rows: how many samples all ranks evaluated. weight: the sum of their weights in the loss.
    sums: over all rows, the loss times the weight, unless the criterion returns None, and each metric; for the
    `whole_metrics`, which have update and compute, the value itself. indices: the samples that this rank evaluated,
    for the record.
    predictions: on rank 0, if requested, the outputs in the dataset's order, shape [rows, ...].
    """

    rows: int
    weight: float
    sums: dict[str, float]
    indices: list[int]
    whole_metrics: list[str] = field(default_factory=list)
    predictions: NDArray[Any] | None = None

    def means(self) -> dict[str, float]:
        """Returns the loss, a weighted mean, and each metric's mean over the rows."""
        divisors = (
            dict.fromkeys(self.sums, float(self.rows)) | {"loss": self.weight} | dict.fromkeys(self.whole_metrics, 1.0)
        )
        return {name: total / divisors[name] for name, total in self.sums.items()}

    def record(self) -> EvaluationRecord:
        """Returns it as a record, without the predictions."""
        return EvaluationRecord(
            self.rows, self.weight, self.sums, tuple(self.whole_metrics), self.means(), self.indices
        )


def plain_model(job: Job, state: dict[str, Tensor], world: World) -> nn.Module:
    """Builds the job's plain model with rank 0's trained `state` on every rank.

    Of ranks that are threads on a CPU, those without rows to evaluate, most of 64, build none: they get an empty one.
    Needs an open process group when world.size > 1. Raises UserError when there is no memory for the model.
    """
    heartbeat.begin(EVALUATION)
    threads = active_turns() is not None and world.device == "cpu"
    weights = state_of_rank_0(state, world) if threads else state
    with _memory_errors(None, world):
        if threads and not chunks_of_rank(job, world)[1]:
            return nn.Module()
        model = job.model().to(world.device)
        if world.rank == 0 or threads:
            model.load_state_dict(weights)
        if world.size > 1 and not threads:
            # All ranks evaluate rank 0's weights and buffers; after training the ranks' buffers differ.
            tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
            # In few messages: 64 ranks that are threads take 64 turns for each.
            dist._broadcast_coalesced(dist.group.WORLD, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined, arg-type]
    return model


def state_of_rank_0(state: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Returns the state of the first of the ranks that are threads, the same one on all of them."""
    shared = _shared_state()
    if world.rank == 0:
        shared.update(state)
    dist.barrier()
    return shared


@alike_on_ranks
def _shared_state() -> dict[str, Tensor]:
    return {}


@contextmanager
def _memory_errors(rows: int | None, world: World) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError that says what needs less memory.

    rows: that are evaluated at once; None: the whole model is built.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        remedy = message("evaluate_elsewhere")
        if rows is not None and rows > 1:
            remedy = message("evaluate_fewer_rows_at_once", rows=rows // 2)
        error.__traceback__ = None  # the frames of the error hold the tensors that fill the memory
        if rows is None:
            raise UserError(message("evaluation_model_out_of_memory", rank=world.rank, remedy=remedy)) from None
        raise UserError(message("evaluation_out_of_memory", rank=world.rank, rows=rows, remedy=remedy)) from None


def chunk_rows(job: Job) -> int:
    """Returns how many rows an evaluation takes at once."""
    return min(job.micro_batch or job.global_batch, MAX_CHUNK_ROWS)


def chunks_of_rank(job: Job, world: World) -> tuple[list[range], range]:
    """Returns the chunks of all rows of the evaluation, and the numbers of those that this rank evaluates."""
    assert job.evaluation is not None
    length, at_once = len(job.evaluation), chunk_rows(job)
    chunks = [range(first, min(first + at_once, length)) for first in range(0, length, at_once)]
    per_rank = cut(len(chunks), world.size)
    first = sum(per_rank[: world.rank])
    return chunks, range(first, first + per_rank[world.rank])


def evaluate(job: Job, model: nn.Module, world: World, *, predictions: bool = False) -> Evaluation:
    """Evaluates the plain `model` on job.evaluation, with the rows divided among the ranks and none padded.

    Every rank must call it, and gets the same figures. The modules' training modes are restored afterwards.
    predictions: also gather the model's outputs on rank 0.
    Raises UserError for lack of memory and for metrics or outputs of a wrong shape, LoadingFailed for data errors.
    """
    assert job.evaluation is not None
    heartbeat.begin(EVALUATION)
    at_once = chunk_rows(job)
    chunks, chunk_numbers = chunks_of_rank(job, world)
    indices = [index for number in chunk_numbers for index in chunks[number]]
    whole_metrics = [name for name, metric in job.metrics.items() if counts_by_itself(metric)]
    by_row = sorted(name for name in job.metrics if name not in whole_metrics)  # as on the other ranks
    table = torch.zeros(len(chunks), 4 + len(by_row), dtype=torch.float64, device=world.device)
    outputs: list[Any] = []
    states: list[StateDict] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), _memory_errors(at_once, world):
        for number, batch in zip(
            chunk_numbers, _batches(job, [chunks[number] for number in chunk_numbers], world.device)
        ):
            heartbeat.begin(EVALUATION, number)
            output, table[number] = without_graph(_output_and_sums, job, model, by_row, batch)
            states.append({name: count_metric(job.metrics[name], output, batch) for name in whole_metrics})
            if predictions:
                outputs.append(_as_array(output, batch.micro_batch.rows))
    heartbeat.begin(EVALUATION)
    for module, training in modes:
        module.training = training
    if world.size > 1:
        dist.all_reduce(table)  # a chunk's sums plus the other ranks' zeros: exact
    rows, weight, without_loss, *totals = (math.fsum(column) for column in table.T.tolist())
    sums = dict(zip(["loss", *by_row], totals))
    if not weight:
        raise UserError(message("evaluation_weighs_nothing"))
    if without_loss:
        del sums["loss"]
    if whole_metrics:
        all_states = [state for of_rank in gather_from_ranks(states, world) for state in of_rank]
        values = _metric_values(job, whole_metrics, all_states)
        # Rank 0's values: machines of two kinds may compute the last digit differently from the same counts, and all
        # ranks must decide alike about the best weights.
        sums |= gather_from_ranks(values, world)[0]
    gathered = _gather_arrays(outputs, world) if predictions else None
    sums = {name: sums[name] for name in ("loss", *job.metrics) if name in sums}
    return Evaluation(int(rows), weight, sums, indices, whole_metrics, gathered)


def _batches(job: Job, chunks: list[range], device: str) -> Iterator[Batch]:
    """Yields a batch for each chunk of the evaluation's rows, loaded ahead as in training."""
    micro_batches = [
        MicroBatch(
            epoch=0,
            step=0,
            micro=0,
            indices=torch.tensor(list(chunk)).numpy(),
            rows=len(chunk),
            weight=float(sum(map(job.evaluation_weight, chunk)) if job.evaluation_weight else len(chunk)),
            share=1.0,
            completes_step=True,
            completes_epoch=False,
        )
        for chunk in chunks
    ]
    assert job.evaluation is not None
    try:
        for batch in loaded(job.evaluated(), micro_batches, device, ahead=active_turns() is None):
            if job.batch_weight and job.evaluation_weight is None:
                weighed = replace(batch.micro_batch, weight=batch_weight(job, batch))
                batch = replace(batch, micro_batch=weighed)
            yield batch
    except LoadingFailed as error:
        raise LoadingFailed(replace(error.message, fields={**error.message.fields, "step": None})) from error


def _output_and_sums(job: Job, model: nn.Module, by_row: list[str], batch: Batch) -> tuple[Any, Tensor]:
    output = job.output(model, batch)
    return output, _sums(job, by_row, output, batch)


def _sums(job: Job, by_row: list[str], output: Any, batch: Batch) -> Tensor:
    """Returns the sums over the rows of a batch, shape [4 + metrics], float64.

    They are [rows, weight, 1 where the criterion returns None, loss, each metric by row].
    """
    rows, weight = batch.micro_batch.rows, batch.micro_batch.weight
    # The criterion's mean over rows that all weigh 0 may be 0 / 0.
    loss: Tensor | None = job.criterion(output, batch) if weight else torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss * weight
    values = [*torch.tensor([rows, weight, loss is None], dtype=torch.float64), total]
    for name in by_row:
        per_row = job.metrics[name](output, batch)
        if list(per_row.shape) != [rows]:
            raise not_per_row(name, list(per_row.shape), rows)
        values.append(per_row.double().sum())
    return torch.stack([value.double().to(total.device) for value in values])


def count_metric(metric: Any, output: Any, batch: Batch) -> StateDict:
    """Returns the state of a torchmetrics metric after one batch, on the CPU. Resets the metric before and after.

    Of another metric, whose states cannot be merged, returns what it is to be updated with.
    """
    given = (output, batch if reads_batch(metric) else batch.targets)
    if not hasattr(metric, "merge_state"):
        return {"given": mapped_tensors(partial(Tensor.to, device="cpu"), given)}
    metric.reset()
    metric.to(output.device if isinstance(output, Tensor) else "cpu")
    metric.update(*given)
    state: StateDict = tree_map_only(Tensor, partial(Tensor.to, device="cpu"), metric.metric_state)
    metric.reset()
    return state


def _metric_values(job: Job, names: list[str], states: list[StateDict]) -> dict[str, float]:
    """Merges the chunks' states of each metric that counts by itself, in the chunks' order. Returns name -> value."""
    values = {}
    for name in names:
        metric: Any = job.metrics[name]
        metric.reset()
        if hasattr(metric, "merge_state"):
            _merge_states(name, metric, [state[name] for state in states])
        else:
            for state in states:
                metric.update(*state[name]["given"])
        with warnings.catch_warnings():  # torchmetrics warns that update() was never called
            warnings.simplefilter("ignore")
            value = metric.compute()
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise _not_a_number(name, metric, value)
        values[name] = float(value)
        metric.reset()
    return values


def _merge_states(name: str, metric: Any, states: list[Any]) -> None:
    """Puts the states of the chunks together in a torchmetrics metric."""
    metric.to("cpu")
    try:
        for state in reversed(states):  # merge_state puts the merged state first
            metric.merge_state(state)
    except RuntimeError as error:
        raise UserError(f"the metric '{name}' cannot be counted in parts ({error}); choose another") from error
    metric.distributed_available_fn = _alone


def _not_a_number(name: str, metric: Any, value: Any) -> UserError:
    """Returns the error of a metric whose compute returns several values, with the line that chooses one."""
    if isinstance(value, Mapping) and value:
        return UserError(
            f"the metric '{name}' computes {first_few([str(key) for key in value])}; write a subclass of "
            f"{type(metric).__name__} that returns one of them: def compute(self): return "
            f"super().compute()[{next(iter(value))!r}]"
        )
    return UserError(f"the metric '{name}' is not a single number; give it an average, as in average='macro'")


def _alone() -> bool:
    """Tells torchmetrics not to merge over the ranks: the state is of all rows already, and would be counted twice."""
    return False


def _gather_arrays(arrays: list[NDArray[Any]], world: World) -> NDArray[Any] | None:
    """Concatenates the arrays of all ranks on rank 0, in rank order. Returns None on the others."""
    of_rank: list[Any] = [arrays] * world.size
    if world.size > 1:
        dist.gather_object(arrays, of_rank if world.rank == 0 else None)
    return np.concatenate([array for rank_arrays in of_rank for array in rank_arrays]) if world.rank == 0 else None


def _as_array(output: Any, rows: int) -> NDArray[Any]:
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != rows:
        kind = f"tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(
            f"--predictions keeps one tensor with a row for each sample, and for {rows} samples forward returns a "
            f"{kind}; leave --predictions out, or let forward return one such tensor"
        )
    tensor = output.float() if output.dtype == torch.bfloat16 else output  # numpy has no bfloat16
    return tensor.cpu().numpy()


class Evaluator(Protocol):
    """Evaluates a training between two epochs."""

    def begin(self, state: Callable[[], StateDict]) -> None: ...

    def is_due(self, done: int, steps_per_epoch: int) -> bool: ...

    def evaluate(self, done: int) -> bool: ...

    def means(self) -> Mapping[str, float]: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def files(self) -> list[Path]: ...


class EvaluationSchedule:
    """The scheduler of `optimizer`, which evaluations step. Every rank has the same figures, and so the same rates."""

    def __init__(self, schedule: LRSchedule, optimizer: Optimizer) -> None:
        self.metric, self.scheduler = schedule.metric, schedule.make(optimizer)
        self.takes_metric = "metrics" in inspect.signature(self.scheduler.step).parameters

    def step(self, means: Mapping[str, float]) -> None:
        """Moves the learning rate after an evaluation."""
        step: Any = self.scheduler.step
        if self.takes_metric:
            step(means[self.metric])
        else:
            step()


class Evaluations(Part):
    """Evaluates a training with its averaged weights, moves the learning rate, and stops the training where the
    evaluator says so. An evaluation counts for no step."""

    def __init__(self, evaluator: Evaluator, stop: Stop, listeners: Listeners | None) -> None:
        self._evaluator, self._stop, self._listeners = evaluator, stop, listeners

    def counted(self) -> None:
        """Evaluates where it is time. Every rank must call it."""
        count, meter = self.training.count, self.training.meter
        if not self._evaluator.is_due(count.done, self.training.schedule.steps_per_epoch):
            return
        if self._listeners:
            self._listeners.pause(meter)
        with self.training.ema.swapped() if self.training.ema else nullcontext():
            ends = self._evaluator.evaluate(count.done)
        if self.training.evaluation_schedule:
            self.training.evaluation_schedule.step(self._evaluator.means())
        meter.resume()
        if ends:
            self._stop.after(count.done)
            count.ends = count.done


@dataclass
class BestWeights:
    """Evaluates one training between its epochs and saves the best weights in the file `weights`.

    every: epochs between two evaluations; 0: only the one at the end. every_steps: optimizer steps between two
    evaluations, besides those between epochs; 0: none. best: the metric and its direction, 'min' or
    'max'; None saves the last weights. patience: how many evaluations without an improvement end the training; None:
    it runs to its end.
    """

    job: Job
    world: World
    steps: int
    weights: Path
    every: int = 1
    best: tuple[str, str] | None = None
    patience: int | None = None
    every_steps: int = 0
    listeners: Listeners | None = None  # are called after every evaluation
    saved: frozenset[str] | None = None  # the names of the tensors to save; None: all of them
    curve: list[dict[str, float]] = field(default_factory=list)
    best_at: int = -1  # index of the best evaluation in the curve
    ended: bool = False  # whether patience has ended the training
    evaluated: EvaluationRecord | None = None  # the latest evaluation's part of the record
    _unsaved: tuple[int, StateDict] | None = None  # the best step and its state, while the disk takes no file

    def begin(self, state: Callable[[], StateDict]) -> None:
        """Registers `state`, which returns the full state dict on rank 0. Every rank must call it."""
        self._state = state

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        """Returns whether to evaluate after `done` steps. Not after the last one: add() evaluates that."""
        apart = [self.every * steps_per_epoch, self.every_steps]
        return done < self.steps and any(steps and done % steps == 0 for steps in apart)

    def evaluate(self, done: int) -> bool:
        """Evaluates after `done` steps; every rank must call it. Returns whether patience ends the training."""
        # It draws random numbers. That changes no training: each micro-batch seeds the generator anew.
        self.add(done, self._state())
        self.ended = self.patience is not None and len(self.curve) - 1 - self.best_at >= self.patience
        return self.ended

    def means(self) -> Mapping[str, float]:
        """Returns the latest evaluation's figures."""
        return self.curve[-1]

    def state_dict(self) -> StateDict:
        """Returns the evaluations so far, for a checkpoint."""
        return {"curve": self.curve, "best_at": self.best_at, "ended": self.ended}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes the evaluations of a checkpoint."""
        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]

    def forget_best(self) -> None:
        """Lets the next evaluation be the best one: those so far are of other data."""
        self.best_at = -1

    def files(self) -> list[Path]:
        """Returns the file of the best weights, where there is one."""
        return [self.weights] if self.best is not None and self.curve else []

    def add(self, done: int, state: StateDict, *, last: bool = False) -> None:
        """Evaluates rank 0's `state` after `done` steps, and saves it if it is the best.

        last: the training has ended; the state is saved if `best` is None or nothing was evaluated before.
        """
        entry: dict[str, float] = {"step": done}
        writes = self.world.rank == 0
        if writes and last and (self.best is None or not self.curve):
            self._must_save(done, state)  # before evaluating: if that fails, the weights are on the disk
        if self.job.evaluation is not None:
            evaluation = evaluate(self.job, plain_model(self.job, state, self.world), self.world)
            entry |= evaluation.means()
            self.evaluated = evaluation.record()
            if self.listeners:
                self.listeners.evaluation(done, evaluation.means())
        better = self.best_at < 0 or self.best is None or _better(entry, self.curve[self.best_at], *self.best)
        self.curve.append(entry)
        if better:
            self.best_at = len(self.curve) - 1
            if writes and self.best is not None:
                self._save(done, state)

    def finish(self) -> None:
        """Saves the best weights, where the disk was full when they were found. Raises UserError where it still is."""
        if self._unsaved:
            self._must_save(*self._unsaved)

    def _save(self, done: int, state: StateDict) -> None:
        """Saves the best weights so far. Where they cannot be written, the training goes on with a copy in memory."""
        try:
            save(state, self.weights, self.saved)
            self._unsaved = None
        except UserError as error:
            self._unsaved = (
                done,
                {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)},
            )
            say(message("best_weights_stay_in_memory", why=error.message, step=done))

    def _must_save(self, done: int, state: StateDict) -> None:
        try:
            save(state, self.weights, self.saved)
        except UserError as error:
            raise UserError(message("weights_not_saved", why=error.message, step=done)) from error


def _better(new: Mapping[str, float], old: Mapping[str, float], name: str, direction: str) -> bool:
    after, before = new.get(name, math.nan), old.get(name, math.nan)
    if math.isnan(before):
        return not math.isnan(after)
    return after > before if direction == "max" else after < before
