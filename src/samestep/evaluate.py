"""Exact distributed evaluation: every sample once on any number of ranks, metrics from summed counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from samestep.data.loader import fetch, to_device
from samestep.data.schedule import cut
from samestep.errors import not_per_row
from samestep.job import Batch, Job, Part
from samestep.world import World


@dataclass(frozen=True)
class Evaluation:
    """rows: how many samples all ranks evaluated; weight: what they weigh in the loss.

    sums: over all rows, of the loss times the weight, and of each metric.

    indices: the samples that this rank evaluated, so that the record can show that each was seen once.
    """

    rows: int
    weight: float
    sums: dict[str, float]
    indices: list[int]

    def means(self) -> dict[str, float]:
        """The loss, the mean over the weights, and each metric, the mean over the rows."""
        return {name: total / (self.weight if name == "loss" else self.rows) for name, total in self.sums.items()}


def plain_model(job: Job, state: dict[str, Tensor], world: World) -> nn.Module:
    """The job's plain model with rank 0's trained `state`, on every rank. Needs an open group when size > 1."""
    model = job.model().to(world.device)
    if world.rank == 0:
        model.load_state_dict(state)
    if world.size > 1:  # all ranks evaluate rank 0's weights and buffers; after training the ranks' buffers differ
        for tensor in (value for value in model.state_dict().values() if isinstance(value, Tensor)):
            dist.broadcast(tensor, src=0)
    return model


def evaluate(job: Job, model: nn.Module, world: World) -> Evaluation:
    """Evaluates the plain `model` on job.evaluation, the rows shared out over the ranks, none padded.

    Leaves every part of the model in the mode in which it found it. The sums are float64 and equal on every rank.
    """
    assert job.evaluation is not None
    length = len(job.evaluation)
    per_rank = cut(length, world.size)
    first = sum(per_rank[: world.rank])
    indices = list(range(first, first + per_rank[world.rank]))
    at_once = job.micro_batch or cut(job.global_batch, world.size)[0]
    names = ["loss", *job.metrics]
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=world.device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        for some in np.array_split(indices, ceil(len(indices) / at_once)) if indices else []:
            sums += _sums(job, model, some.tolist(), world.device)
    for module, training in modes:
        module.training = training
    if world.size > 1:
        dist.all_reduce(sums)
    rows, weight, *totals = sums.tolist()
    return Evaluation(int(rows), weight, dict(zip(names, totals)), indices)


def _sums(job: Job, model: nn.Module, indices: list[int], device: str) -> Tensor:
    """[rows, weight, loss, each metric], summed over the rows at `indices`. float64"""
    rows = len(indices)
    weight = float(sum(map(job.evaluation_weight, indices)) if job.evaluation_weight else rows)
    data: Any = (job.collate or default_collate)(fetch(job.evaluation, indices))
    place = Part(
        epoch=0,
        step=0,
        micro=0,
        indices=torch.tensor(indices).numpy(),
        rows=rows,
        weight=weight,
        share=1.0,
        completes_step=True,
        completes_epoch=False,
    )
    batch = Batch(to_device(data, device), place)
    output = job.forward(model, batch)
    counts = torch.tensor([rows, weight], dtype=torch.float64, device=device)
    values = [*counts, job.criterion(output, batch) * weight]
    for name, metric in job.metrics.items():
        of_rows = metric(output, batch)
        if of_rows.dim() == 0 or len(of_rows) != rows:
            raise not_per_row(name, list(of_rows.shape), rows)
        values.append(of_rows.double().sum())
    return torch.stack([value.double() for value in values])
