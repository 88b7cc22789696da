"""Weights that a batch decides: of one process here; tests/mutations and the proof have those of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from messages import ids
from samestep import Batch, Job, Recipe
from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.errors import UserError
from samestep.rank.evaluate import evaluate
from samestep.rank.step import with_weights
from samestep.world import World

TARGETS = torch.tensor([1, -100, 2, -100, -100, 0, 1, 1])


def _job(**changed: Any) -> Job:
    return Job(
        lambda: nn.Linear(2, 3),
        lambda output, batch: output.mean(),
        Recipe(torch.optim.SGD, {"lr": 0.1}),
        TensorDataset(torch.zeros(8, 2), TARGETS),
        4,
        **{"shuffle": False, "micro_batch": 2, "batch_weight": _count, **changed},
    )


def _count(batch: Batch) -> torch.Tensor:
    return (batch.targets != -100).sum()


def _weighed(job: Job) -> list[Batch]:
    schedule = schedule_of(job, 1)
    return list(with_weights(batches(job, World(), schedule, 2), job, World()))


def test_a_share_is_of_the_whole_step() -> None:
    assert [batch.micro_batch.weight for batch in _weighed(_job())] == [1, 1, 1, 2]
    assert [batch.micro_batch.share for batch in _weighed(_job())] == [1 / 2, 1 / 2, 1 / 3, 2 / 3]


def test_a_step_in_which_nothing_weighs_has_no_gradient() -> None:
    weighed = _weighed(_job(batch_weight=lambda batch: 0))
    assert [batch.micro_batch.share for batch in weighed] == [0.0] * 4


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_what_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(UserError) as error:
        _weighed(_job(batch_weight=lambda batch: weight))
    assert "batch_weight_is_no_weight" in ids(error.value.message)


@pytest.mark.parametrize("returned", [None, "many", 1j, torch.ones(2)], ids=str)
def test_what_is_no_number_is_refused(returned: Any) -> None:
    with pytest.raises(UserError) as error:
        _weighed(_job(batch_weight=lambda batch: returned))
    assert "batch_weight_is_no_number" in ids(error.value.message)


def test_an_evaluation_in_which_nothing_weighs_is_refused() -> None:
    job = _job(batch_weight=lambda batch: 0, evaluation=TensorDataset(torch.zeros(8, 2), TARGETS))
    with pytest.raises(UserError) as error:
        evaluate(job, job.model(), World())
    assert "evaluation_weighs_nothing" in ids(error.value.message)


@pytest.mark.parametrize("other", [{"weight": float}, {"gather_outputs": True, "micro_batch": None}])
def test_two_weights_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="batch_weight and"):
        _job(**other)
