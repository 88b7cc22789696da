"""The rows of a dataset that are unlike others, which the proof trains beside evenly spaced ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from samestep import Job, Recipe
from samestep.records.plan import ProveTask
from samestep.tasks.inspect.extremes import LEAST_ROWS, MOST_BYTES, MOST_ROWS, MOST_UNREADABLE, find_extremes
from samestep.tasks.proof_job import extreme_rows, proof_job

ROWS, FEW = 1200, [17, 777]


def _job(train: Any, **changed: Any) -> Job:
    return Job(
        lambda: nn.Linear(9, 2),
        lambda output, batch: output.mean(),
        Recipe(torch.optim.SGD, {"lr": 0.1}),
        train,
        12,
        **changed,
    )


def _with(value: float, columns: int = 9) -> torch.Tensor:
    data = torch.full((ROWS, columns), 5.0) + torch.arange(columns)
    data[FEW, min(3, columns - 1) :] = value
    return data.long()


class Ragged(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4 if index in FEW else 9)


@pytest.mark.parametrize(
    "train",
    [
        TensorDataset(torch.randn(ROWS, 9), _with(0)),
        TensorDataset(torch.randn(ROWS, 9), _with(1)),
        TensorDataset(torch.randn(ROWS, 9), _with(-100)),
        TensorDataset(torch.randn(ROWS, 9), _with(-100, 1).flatten()),
        TensorDataset(torch.randn(ROWS, 9), torch.isin(torch.arange(ROWS), torch.tensor(FEW)).logical_not()),
        Ragged(),
    ],
    ids=["padded with 0", "padded with another number", "ignored", "an ignored label", "a mask", "short rows"],
)
def test_few_rows_are_found_and_trained(train: Any) -> None:
    found = find_extremes(_job(train))
    assert found.rows[0] in FEW or found.rows[1] in FEW
    assert found.looked_at == ROWS
    training = ProveTask("sgd", 8, "float64", 2, 0.05, extremes=found.rows)
    subset = proof_job(_job(train), training).train
    assert len(subset) == len(proof_job(_job(train), replace(training, extremes=())).train)
    assert len(extreme_rows(_job(train), training)) >= 1


def test_a_weight_is_an_extreme_too() -> None:
    job = _job(TensorDataset(torch.zeros(ROWS, 9)), weight=lambda index: 1.0 + (index == 501))
    assert find_extremes(job).rows[0] == 501


def test_a_large_dataset_is_looked_at_in_part() -> None:
    assert find_extremes(_job(TensorDataset(torch.zeros(5 * MOST_ROWS, 2)))).looked_at == MOST_ROWS


def test_a_row_that_is_not_finite_is_no_extreme() -> None:
    inputs = torch.randn(ROWS, 9)
    inputs[17] = torch.nan
    assert 17 not in find_extremes(_job(TensorDataset(inputs, _with(0)))).rows


def test_a_sample_that_cannot_be_read_is_left_out() -> None:
    class Broken(Ragged):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 100:
                raise OSError
            return super().__getitem__(index)

    assert find_extremes(_job(Broken())).looked_at == ROWS - 1


def test_of_a_slow_dataset_the_same_rows_are_found() -> None:
    class Slow(Ragged):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.001)
            return super().__getitem__(index)

    assert find_extremes(_job(Slow())) == find_extremes(_job(Ragged()))


@pytest.mark.parametrize(("numbers", "expected"), [(MOST_BYTES // 4 // 40 + 1, 40), (MOST_BYTES // 4 // 8, LEAST_ROWS)])
def test_how_many_rows_are_looked_at_follows_their_bytes(numbers: int, expected: int) -> None:
    class Large(Ragged):
        def __getitem__(self, index: int) -> torch.Tensor:
            return row

    row = torch.zeros(numbers)
    assert find_extremes(_job(Large())).looked_at == expected


def test_a_dataset_that_cannot_be_read_is_left_soon() -> None:
    class Unreadable(Ragged):
        def __getitem__(self, index: int) -> torch.Tensor:
            tried.append(index)
            raise OSError

    tried: list[int] = []
    assert find_extremes(_job(Unreadable())).looked_at == 0
    assert len(tried) == MOST_UNREADABLE
