"""The reference's evaluation: in one process, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from samestep.bounds import EVALUATION_APART, EVALUATION_APART_IN_LOWER, SUM_ULPS
from samestep.errors import UserError, not_per_row
from samestep.job import Batch, Job, counts_by_itself, reads_batch
from samestep.job.walk import without_graph
from samestep.message import message
from samestep.records.training_record import EvaluationRecord
from samestep.reference.fetch import (
    collate,
    collate_draws,
    generators_kept,
    place,
    random_state,
    read,
    weight_of_batch,
)
from samestep.reference.replica_state import output_and_loss, output_of

ROWS_AT_ONCE = 16
WEIGHT = "weight of the rows"  # beside the names of the metrics


def evaluate(job: Job, state: Mapping[str, Tensor], device: str, *, twice: bool) -> EvaluationRecord | None:
    """Evaluates the weights in `state`, loaded into a new model; None where the job has no evaluation dataset.

    twice: once more, with another number of rows at once, as many as engines take: sums that then differ are
    `unsteady`.
    """
    if job.evaluation is None:
        return None
    job, model = _evaluated(job, state, device)
    assert job.evaluation is not None
    length = len(job.evaluation)
    weighs = [float(job.evaluation_weight(i)) if job.evaluation_weight else 1.0 for i in range(length)]
    before = random_state(device)
    index, batches = torch.arange(length), ceil(length / ROWS_AT_ONCE)
    try:
        sums = _sums(job, model, device, weighs, index.tensor_split(batches))
    except (RuntimeError, ValueError, IndexError):  # a job that takes no other number of rows than its own
        twice = False
        sums = _sums(job, model, device, weighs, torch.split(index, _rows_of_engine(job)))
    draws = not torch.equal(before, random_state(device)) or collate_draws(job, job.evaluation)
    # Fewer rows at once may be too few for a loss of the largest 20 to leave some out.
    of_engine = torch.split(index, _rows_of_engine(job))
    again = of_engine if len(of_engine) < batches else index.tensor_split(batches + 1)
    sums_again = _sums(job, model, device, weighs, again) if twice and length > 1 else sums
    # A sum that differs by more is further off than a comparison in this dtype allows.
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    precision = max(EVALUATION_APART, SUM_ULPS * torch.finfo(dtype).eps)
    unsteady = tuple(n for n in sums if draws or not abs(sums[n] - sums_again[n]) <= precision * max(1, abs(sums[n])))
    whole_metrics = tuple(name for name, metric in job.metrics.items() if counts_by_itself(metric))
    weight = sums.pop(WEIGHT)
    if not weight:
        raise UserError(message("evaluation_weighs_nothing"))
    return EvaluationRecord(length, weight, sums, whole_metrics, unsteady=unsteady)


def _evaluated(job: Job, state: Mapping[str, Tensor], device: str) -> tuple[Job, torch.nn.Module]:
    """The job with the collate of its evaluation, and a new model with the weights in `state`, in evaluation mode."""
    model = job.model().to(device)
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    model.load_state_dict({**extra, **state})
    return replace(job, collate=job.evaluation_collate or job.collate), model.eval()


def _rows_of_engine(job: Job) -> int:
    """How many rows an engine's evaluation takes at once."""
    return min(job.micro_batch or job.global_batch, 128)


def predictions(job: Job, state: Mapping[str, Tensor], device: str, *, twice: bool) -> Tensor | None:
    """The outputs of the evaluation's rows, in their order, shape [rows, ...].

    None where they are no tensor with a row for each, or draw random numbers; twice: also where they depend on the
    number of rows at once.
    """
    job, model = _evaluated(job, state, device)
    assert job.evaluation is not None
    index, before = torch.arange(len(job.evaluation)), random_state(device)
    splits = [torch.split(index, _rows_of_engine(job))]
    if twice:
        splits.append(index.tensor_split(ceil(len(index) / ROWS_AT_ONCE) + 1))
    try:
        first, *again = [_outputs(job, model, device, batches) for batches in splits]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    if not torch.equal(before, random_state(device)) or collate_draws(job, job.evaluation):
        return None
    precision = EVALUATION_APART if first.dtype == torch.float64 else EVALUATION_APART_IN_LOWER
    alike = all(torch.allclose(first, repeated, rtol=precision, atol=precision) for repeated in again)
    return first if alike and first.is_floating_point() else None


def _outputs(job: Job, model: torch.nn.Module, device: str, batches: Sequence[Tensor]) -> Tensor:
    """The outputs of all rows. Raises TypeError where they are no tensor with a row for each."""
    outputs: list[Tensor] = []
    with torch.no_grad():
        for rows in (indices.tolist() for indices in batches):
            output = without_graph(output_of, job, model, _batch(job, rows, float(len(rows)), device))
            if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(rows):
                raise TypeError("no tensor with a row for each")
            outputs.append(output.cpu())
    return torch.cat(outputs)


def _batch(job: Job, rows: list[int], weight: float, device: str) -> Batch:
    with generators_kept():
        data = collate(job, read(job, job.evaluation, rows, 0), device, 0, rows[0])
    return Batch(data, place(0, 0, rows, weight=weight))


def _sums(
    job: Job, model: torch.nn.Module, device: str, weighs: list[float], batches: Sequence[Tensor]
) -> dict[str, float]:
    """The sums over all rows, and their weight. batches: the rows of each."""
    sums = dict.fromkeys(["loss", *job.metrics, WEIGHT], 0.0)
    whole_metrics: dict[str, Any] = {name: metric for name, metric in job.metrics.items() if counts_by_itself(metric)}
    for metric in whole_metrics.values():
        if hasattr(metric, "to"):
            metric.to(device)
        metric.reset()
    with torch.no_grad():
        for rows in (some.tolist() for some in batches):
            batch = _batch(job, rows, sum(weighs[i] for i in rows), device)
            if job.batch_weight and not job.evaluation_weight:
                own_weight = weight_of_batch(job, rows, batch.data, 0, 0)
                batch = replace(batch, micro_batch=replace(batch.micro_batch, weight=own_weight))
            weight = batch.micro_batch.weight
            sums[WEIGHT] += weight
            output, loss = without_graph(output_and_loss, job, model, batch)
            if loss is None:  # the output of an evaluation has no loss
                sums.pop("loss", None)
            elif "loss" in sums and weight:
                sums["loss"] += float(loss) * weight
            for metric in whole_metrics.values():
                metric.update(output, batch if reads_batch(metric) else batch.targets)
            for name, metric in job.metrics.items():
                if name in whole_metrics:
                    continue
                values = metric(output, batch)
                if list(values.shape) != [len(rows)]:
                    raise not_per_row(name, list(values.shape), len(rows))
                sums[name] += float(values.double().sum())
    for name, metric in whole_metrics.items():
        sums[name] = float(metric.compute())
        metric.reset()
    return sums


def after_evaluation(job: Job, scheduler: Any, result: EvaluationRecord | None) -> None:
    """Steps a scheduler that evaluations step, with the mean of the metric that it watches."""
    assert job.scheduler and result
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(result.mean(job.scheduler.metric))
    else:
        scheduler.step()
