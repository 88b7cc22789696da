"""Makes the job that a proof trains: the user's, on a few rows, changed as little as the proof needs.

Three trainings: `gradient` (one step of plain SGD at rate 1, nothing clipped: the weights' change is the first
gradient), `sgd` (SGD with momentum, which decides) and `user` (the job's own optimizer, which confirms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Subset, TensorDataset

from samestep.data.stream import is_stream
from samestep.job import Job, Recipe
from samestep.records.plan import Prove

SGD_LR = 0.05  # tried first; while the loss explodes, the reference takes a quarter of it


def proof_job(job: Job, training: Prove) -> Job:
    """Puts `job` on a subset that crosses an epoch's end with an uneven batch, in the proof's dtype and optimizer."""
    dtype = getattr(torch, training.dtype)
    of_samples = None if job.collate else dtype  # a collate makes its tensors itself, and they are cast after it
    rows = _spread(job.train, subset_length(len(job.train), job.global_batch, training))
    evaluated = [] if job.evaluation is None else _spread(job.evaluation, evaluated_rows(job, training.replicas))
    small = replace(
        job,
        model=lambda: job.model().to(dtype),
        collate=_with_cast(job.collate, dtype),
        augment=_with_cast(job.augment, dtype),
        train=_subset(job.train, rows, None if job.augment else of_samples),
        weight=_renumbered(job.weight, rows),
        evaluation=None if job.evaluation is None else _subset(job.evaluation, evaluated, of_samples),
        evaluation_weight=_renumbered(job.evaluation_weight, evaluated),
    )
    if training.training == "gradient":
        return replace(small, optimizer=Recipe(torch.optim.SGD, {"lr": 1.0}), scheduler=None, clip_norm=None)
    if training.training == "sgd":
        return replace(small, optimizer=_sgd(job.optimizer, training.sgd_lr))
    return small


def steps_of(training: Prove) -> int:
    """How many optimizer steps a training of the proof takes."""
    return 1 if training.training == "gradient" else training.steps


def subset_length(length: int, global_batch: int, training: Prove) -> int:
    """Rows of the proof's subset: whole batches, then one that the replicas cannot share evenly: as large as the job's
    own last batch where that is uneven (and may leave replicas without rows), else of about half the rows.

    It is short enough for the steps to enter a second epoch. A dataset that has no more rows is taken whole.
    """
    replicas = training.replicas
    own = length % global_batch
    uneven = max(global_batch // 2, min(2 * replicas, global_batch - 1))
    while replicas > 1 and uneven < global_batch - 1 and uneven % replicas == 0:
        uneven += 1
    if own % replicas:
        uneven = own
    whole = max(1, training.steps * 5 // 8 - 1)  # of 8 steps: 4 whole, 1 uneven, then 3 of the next epoch
    return min(length, whole * global_batch + uneven)


def evaluated_rows(job: Job, replicas: int) -> int:
    """Rows of the proof's evaluation: a little more than two batches, which the replicas cannot share evenly."""
    rows = 2 * job.global_batch + 1
    while replicas > 1 and rows % replicas == 0:
        rows += 1
    return min(len(job.evaluation), rows) if job.evaluation is not None else 0


def _spread(dataset: Any, rows: int) -> list[int]:
    """Indices of so many rows: a stream's first, else spread evenly, because many datasets are sorted by class."""
    return list(range(rows)) if is_stream(dataset) else [i * len(dataset) // rows for i in range(rows)]


def _subset(dataset: Any, rows: list[int], dtype: torch.dtype | None) -> Any:
    """The samples at `rows`, in `dtype`. A TensorDataset stays one: the loader then takes the path of training."""
    if type(dataset) is not TensorDataset:  # a subclass may have a __getitem__ of its own
        return Subset(dataset, rows) if dtype is None else _CastSubset(dataset, rows, dtype)
    return TensorDataset(*(_cast(tensor[rows], dtype) if dtype else tensor[rows] for tensor in dataset.tensors))


class _CastSubset(Subset[Any]):
    """A subset whose samples are in the proof's dtype."""

    def __init__(self, dataset: Any, rows: list[int], dtype: torch.dtype) -> None:
        super().__init__(dataset, rows)
        self.dtype = dtype

    def __getitem__(self, index: Any) -> Any:
        return _cast(super().__getitem__(index), self.dtype)  # type: ignore[no-untyped-call]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [_cast(sample, self.dtype) for sample in super().__getitems__(indices)]


def _renumbered(weight: Callable[[int], float] | None, rows: list[int]) -> Callable[[int], float] | None:
    """`weight` by the index in the subset at `rows`."""
    return (lambda index: weight(rows[index])) if weight else None


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor, array and number in `data` as `dtype`."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.floating) and np.issubdtype(leaf.dtype, np.floating):
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=dtype)
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, data)


def _with_cast(function: Callable[..., Any] | None, dtype: torch.dtype) -> Callable[..., Any] | None:
    """`function`, its result in `dtype`."""
    return (lambda *args: _cast(function(*args), dtype)) if function else None


def _sgd(recipe: Recipe, lr: float) -> Recipe:
    """SGD with momentum over the recipe's own groups; their learning rates keep their ratio, their decay stays."""
    base = recipe.settings.get("lr", 1e-3)
    groups = recipe.groups

    def sgd_groups(model: nn.Module) -> list[dict[str, Any]]:
        assert groups is not None
        given: list[Any] = list(groups(model))
        if not all(isinstance(group, dict) for group in given):  # parameters alone, as torch takes them too
            given = [{"params": given}]
        return [
            {
                "params": group["params"],
                "lr": lr * group["lr"] / base if "lr" in group else lr,
                "weight_decay": group.get("weight_decay", 0.0),
            }
            for group in given
        ]

    return Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9}, sgd_groups if groups else None)
