"""What a proof trains: the user's job, changed as little as the proof needs, for a few steps.

Three trainings: `gradient` (one step of plain SGD at rate 1, nothing clipped: the weights' change is the first
gradient), `sgd` (SGD with momentum, which decides) and `user` (the job's own optimizer, which confirms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Subset, TensorDataset, default_collate

from samestep.job import Job, Recipe

SGD_LR = 0.05


@dataclass(frozen=True)
class Training:
    """name: 'gradient', 'sgd' or 'user'. dtype: 'float64', or 'float32' for a model that float64 does not fit.

    replicas: at most.
    """

    name: str
    steps: int
    dtype: str
    replicas: int


def proof_job(job: Job, training: Training) -> Job:
    """`job` on a subset that crosses an epoch's end with an uneven batch, in the proof's dtype and optimizer."""
    dtype = getattr(torch, training.dtype)
    rows = _spread(len(job.train), subset_length(len(job.train), job.global_batch, training))
    evaluated = (
        []
        if job.evaluation is None
        else _spread(len(job.evaluation), min(len(job.evaluation), 2 * job.global_batch + 1))
    )
    small = replace(
        job,
        model=lambda: job.model().to(dtype),
        collate=_typed_collate(job, dtype),
        train=_thinned(job.train, rows, dtype),
        weight=_renumbered(job.weight, rows),
        evaluation=None if job.evaluation is None else _thinned(job.evaluation, evaluated, dtype),
        evaluation_weight=_renumbered(job.evaluation_weight, evaluated),
    )
    if training.name == "gradient":
        return replace(small, optimizer=Recipe(torch.optim.SGD, {"lr": 1.0}), scheduler=None, clip_norm=None)
    if training.name == "sgd":
        return replace(small, optimizer=_sgd(job.optimizer))
    return small


def steps_of(training: Training) -> int:
    """How many optimizer steps a training of the proof takes."""
    return 1 if training.name == "gradient" else training.steps


def subset_length(length: int, global_batch: int, training: Training) -> int:
    """Rows of the proof's subset: whole batches, then one of about half the rows that the replicas cannot share evenly.

    It is short enough for the steps to enter a second epoch. A dataset that has no more rows is taken whole.
    """
    replicas = training.replicas
    uneven = max(global_batch // 2, min(2 * replicas, global_batch - 1))
    while replicas > 1 and uneven < global_batch - 1 and uneven % replicas == 0:
        uneven += 1
    whole = max(1, training.steps * 5 // 8 - 1)  # of 8 steps: 4 whole, 1 uneven, then 3 of the next epoch
    return min(length, whole * global_batch + uneven)


def _spread(length: int, rows: int) -> list[int]:
    """`rows` indices spread evenly over `length`, because many datasets are sorted by class."""
    return [i * length // rows for i in range(rows)]


def _thinned(dataset: Any, rows: list[int], dtype: torch.dtype) -> Any:
    """The samples at `rows`. A TensorDataset stays one, so that the loader takes the path that it takes in training."""
    if type(dataset) is TensorDataset:  # a subclass may have a __getitem__ of its own
        return TensorDataset(*(_typed(tensor[rows], dtype) for tensor in dataset.tensors))
    return Subset(dataset, rows)


def _renumbered(weight: Callable[[int], float] | None, rows: list[int]) -> Callable[[int], float] | None:
    return (lambda index: weight(rows[index])) if weight else None


def _typed(data: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, data)


def _typed_collate(job: Job, dtype: torch.dtype) -> Callable[[list[Any]], Any] | None:
    datasets = [job.train] if job.evaluation is None else [job.train, job.evaluation]
    if job.collate is None and all(type(dataset) is TensorDataset for dataset in datasets):
        return None  # they are typed already
    collate = job.collate or default_collate
    return lambda samples: _typed(collate(samples), dtype)


def _sgd(recipe: Recipe) -> Recipe:
    """SGD with momentum over the recipe's own groups; their learning rates keep their ratio, their decay stays."""
    base = recipe.settings.get("lr", 1e-3)
    groups = recipe.groups

    def sgd_groups(model: nn.Module) -> list[dict[str, Any]]:
        assert groups is not None
        return [
            {
                "params": group["params"],
                "lr": SGD_LR * group["lr"] / base if "lr" in group else SGD_LR,
                "weight_decay": group.get("weight_decay", 0.0),
            }
            for group in groups(model)
        ]

    return Recipe(torch.optim.SGD, {"lr": SGD_LR, "momentum": 0.9}, sgd_groups if groups else None)
