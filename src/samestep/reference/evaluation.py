"""The reference's evaluation: one process, a few rows at a time."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from samestep.errors import not_per_row
from samestep.job import Batch, Job
from samestep.reference.fetch import collate, place, random_state

ROWS_AT_ONCE = 16


def evaluate(job: Job, state: dict[str, Tensor], device: str) -> dict[str, Any] | None:
    """What the weights in `state`, loaded into a new model, come to: {rows, weight, sums, unsteady, whole}.

    whole: the metrics of torchmetrics, whose 'sum' is their value.
    unsteady: the sums that depend on how many rows are evaluated at once, or on random numbers.
    """
    if job.evaluation is None:
        return None
    model = job.model().to(device)
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    model.load_state_dict({**extra, **state})
    model.eval()
    length = len(job.evaluation)
    weighs = [float(job.evaluation_weight(i)) if job.evaluation_weight else 1.0 for i in range(length)]
    before = random_state(device)
    sums = _sums(job, model, device, weighs, ceil(length / ROWS_AT_ONCE))
    draws = not torch.equal(before, random_state(device))
    other = _sums(job, model, device, weighs, ceil(length / ROWS_AT_ONCE) + 1) if length > 1 else sums
    precision = 1e-9 if next(model.parameters()).dtype == torch.float64 else 1e-3
    unsteady = [n for n in sums if draws or not abs(sums[n] - other[n]) <= precision * max(1, abs(sums[n]))]
    whole = [name for name, metric in job.metrics.items() if hasattr(metric, "compute")]
    return {"rows": length, "weight": sum(weighs), "sums": sums, "unsteady": unsteady, "whole": whole}


def _sums(job: Job, model: torch.nn.Module, device: str, weighs: list[float], batches: int) -> dict[str, float]:
    sums = dict.fromkeys(["loss", *job.metrics], 0.0)
    whole: dict[str, Any] = {name: metric for name, metric in job.metrics.items() if hasattr(metric, "compute")}
    for metric in whole.values():
        metric.to(device).reset()
    with torch.no_grad():
        for rows in (some.tolist() for some in torch.arange(len(weighs)).tensor_split(batches)):
            weight = sum(weighs[i] for i in rows)
            data = collate(job, [job.evaluation[i] for i in rows], device)  # type: ignore[index]
            batch = Batch(data, place(0, 0, rows, weight=weight))
            output = job.forward(model, batch)
            sums["loss"] += float(job.criterion(output, batch)) * weight
            for metric in whole.values():
                metric.update(output, batch.targets)
            for name, metric in job.metrics.items():
                if name in whole:
                    continue
                values = metric(output, batch)
                if list(values.shape) != [len(rows)]:
                    raise not_per_row(name, list(values.shape), len(rows))
                sums[name] += float(values.double().sum())
    for name, metric in whole.items():
        sums[name] = float(metric.compute())
        metric.reset()
    return sums
