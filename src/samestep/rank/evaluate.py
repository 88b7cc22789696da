"""Exact distributed evaluation: every sample once on any number of ranks, and the same digits on each number.

The rows are cut into chunks that do not depend on the number of ranks, and a chunk's sums are added in the order of
the chunks: neither the rows that a kernel sees at once nor the order of additions changes with the ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.data.loader import loaded
from samestep.data.same_data import gather_from_ranks
from samestep.data.schedule import cut
from samestep.errors import LoadingFailed, UserError, not_per_row
from samestep.job import Batch, Job, Part, counts_by_itself
from samestep.rank.hardware import is_out_of_memory
from samestep.records.record import EvaluationSeen
from samestep.world import World

ROWS_AT_ONCE = 128  # at most; fewer where the job's micro-batch or global batch is smaller


@dataclass(frozen=True)
class Evaluation:
    """rows: how many samples all ranks evaluated; weight: what they weigh in the loss.

    sums: over all rows, of the loss times the weight, and of each metric; of those named in `whole`, torchmetrics'
    own, the value.
    indices: the samples that this rank evaluated, so that the record can show that each was seen once.
    predictions: on rank 0, the outputs in the dataset's order, where they were asked for. shape [rows, ...]
    """

    rows: int
    weight: float
    sums: dict[str, float]
    indices: list[int]
    whole: list[str] = field(default_factory=list)
    predictions: NDArray[Any] | None = None

    def means(self) -> dict[str, float]:
        """The loss, the mean over the weights, and each metric, the mean over the rows."""
        by = dict.fromkeys(self.sums, float(self.rows)) | {"loss": self.weight} | dict.fromkeys(self.whole, 1.0)
        return {name: total / by[name] for name, total in self.sums.items()}

    def record(self) -> EvaluationSeen:
        """What the record keeps of it."""
        return EvaluationSeen(self.rows, self.weight, self.sums, tuple(self.whole), self.means(), self.indices)


def plain_model(job: Job, state: dict[str, Tensor], world: World) -> nn.Module:
    """The job's plain model with rank 0's trained `state`, on every rank. Needs an open group when size > 1."""
    with _in_memory("for the whole model, which evaluation builds beside the training", 0, world):
        model = job.model().to(world.device)
    if world.rank == 0:
        model.load_state_dict(state)
    if world.size > 1:  # all ranks evaluate rank 0's weights and buffers; after training the ranks' buffers differ
        for tensor in (value for value in model.state_dict().values() if isinstance(value, Tensor)):
            dist.broadcast(tensor, src=0)
    return model


@contextmanager
def _in_memory(what: str, rows: int, world: World) -> Iterator[None]:
    """Raises UserError where there is no memory inside, with what needs less of it."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        less = f"--set micro_batch={rows // 2} takes fewer, in training too, whose steps stay the same"
        other = "evaluate its weights by themselves, with samestep evaluate, where there is more"
        error.__traceback__ = None  # whose frames hold what fills the memory
        raise UserError(f"rank {world.rank} has no memory {what}; {less if rows > 1 else other}") from None


def evaluate(job: Job, model: nn.Module, world: World, *, predictions: bool = False) -> Evaluation:
    """Evaluates the plain `model` on job.evaluation, the rows shared out over the ranks, none padded.

    Leaves every part of the model in the mode in which it found it. The figures are equal on every rank.
    """
    assert job.evaluation is not None
    length = len(job.evaluation)
    at_once = min(job.micro_batch or job.global_batch, ROWS_AT_ONCE)
    chunks = [range(first, min(first + at_once, length)) for first in range(0, length, at_once)]
    per_rank = cut(len(chunks), world.size)
    first = sum(per_rank[: world.rank])
    mine = range(first, first + per_rank[world.rank])
    indices = [index for number in mine for index in chunks[number]]
    whole = [name for name, metric in job.metrics.items() if counts_by_itself(metric)]
    by_row = [name for name in job.metrics if name not in whole]
    table = torch.zeros(len(chunks), 3 + len(by_row), dtype=torch.float64, device=world.device)
    outputs: list[Any] = []
    states: list[dict[str, Any]] = []
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), _in_memory(f"to evaluate {at_once} rows at once", at_once, world):
        for number, batch in zip(mine, _batches(job, [chunks[number] for number in mine], world.device)):
            output = job.forward(model, batch)
            table[number] = _sums(job, by_row, output, batch)
            states.append({name: counted(job.metrics[name], output, batch) for name in whole})
            if predictions:
                outputs.append(_array(output, batch.part.rows))
    for module, training in modes:
        module.training = training
    if world.size > 1:
        dist.all_reduce(table)  # a chunk's sums plus the other ranks' zeros: exact
    rows, weight, *totals = (math.fsum(column) for column in table.T.tolist())
    sums = dict(zip(["loss", *by_row], totals))
    if whole:
        values = _values(job, whole, [state for of_rank in gather_from_ranks(states, world) for state in of_rank])
        # Rank 0's, because what machines of two kinds make of the same counts may differ in the last digit, and all
        # ranks must come to one decision about them.
        sums |= gather_from_ranks(values, world)[0]
    joined = _joined(outputs, world) if predictions else None
    return Evaluation(int(rows), weight, {name: sums[name] for name in ("loss", *job.metrics)}, indices, whole, joined)


def _batches(job: Job, chunks: list[range], device: str) -> Iterator[Batch]:
    """The evaluation's rows, a batch for each chunk, loaded ahead as those of the training are."""
    parts = [
        Part(
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
        yield from loaded(replace(job, train=job.evaluation, augment=None), parts, device)
    except LoadingFailed as error:
        raise LoadingFailed(str(error).replace("the rows of step 0", "the evaluation's rows")) from error


def _sums(job: Job, by_row: list[str], output: Any, batch: Batch) -> Tensor:
    """[rows, weight, loss, each metric by row], summed over the rows of a batch. float64"""
    rows, weight = batch.part.rows, batch.part.weight
    # Rows that all weigh 0 may have no mean: 0 / 0.
    loss = job.criterion(output, batch) * weight if weight else torch.zeros((), dtype=torch.float64)
    values = [*torch.tensor([rows, weight], dtype=torch.float64), loss]
    for name in by_row:
        of_rows = job.metrics[name](output, batch)
        if list(of_rows.shape) != [rows]:
            raise not_per_row(name, list(of_rows.shape), rows)
        values.append(of_rows.double().sum())
    return torch.stack([value.double().to(loss.device) for value in values])


def counted(metric: Any, output: Any, batch: Batch) -> dict[str, Any]:
    """What a metric of torchmetrics counts in one batch, on the CPU. It is empty afterwards."""
    metric.reset()
    metric.to(output.device if isinstance(output, Tensor) else "cpu")
    metric.update(output, batch.targets)
    state: dict[str, Any] = tree_map_only(Tensor, partial(Tensor.to, device="cpu"), metric.metric_state)
    metric.reset()
    return state


def _values(job: Job, names: list[str], states: list[dict[str, Any]]) -> dict[str, float]:
    """Each torchmetrics metric of all chunks, whose states are merged in the chunks' order."""
    values = {}
    for name in names:
        metric: Any = job.metrics[name]
        metric.reset()
        metric.to("cpu")
        try:
            for state in reversed(states):  # a state that is merged goes before what is there
                metric.merge_state(state[name])
        except RuntimeError as error:
            raise UserError(f"the metric '{name}' cannot be counted in parts ({error}); choose another") from error
        with warnings.catch_warnings():  # it has merged, and not been updated
            warnings.simplefilter("ignore")
            value = metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"the metric '{name}' is no single number; give it an average, as in average='macro'")
        values[name] = float(value)
        metric.reset()
    return values


def _joined(mine: list[NDArray[Any]], world: World) -> NDArray[Any] | None:
    """The arrays of all ranks in one, on rank 0, in the order of the ranks."""
    of_rank: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.gather_object(mine, of_rank if world.rank == 0 else None)
    return np.concatenate([array for arrays in of_rank for array in arrays]) if world.rank == 0 else None


def _array(output: Any, rows: int) -> NDArray[Any]:
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != rows:
        raise UserError("predictions can be kept only where the model's output is one tensor, a row for each sample")
    whole = output.float() if output.dtype == torch.bfloat16 else output  # which numpy has not
    return whole.cpu().numpy()
