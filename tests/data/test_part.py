"""A part of a dataset has its rows, in their order, and is read in the way in which the dataset is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from samestep import Arrays, Job, Recipe, Windows
from samestep.data.loader import Rows
from samestep.data.part import Part, PartInBatches, PartOfArrays, part_of
from samestep.job import MicroBatch
from samestep.reference.streams import with_reader

ROWS = [7, 2, 5]


class Refusing(Dataset[int]):
    """A dataset whose fifth row cannot be read."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("broken")
        return index


def arrays(folder: Path) -> Arrays:
    for number, rows in enumerate(np.split(np.arange(20, dtype=np.float32).reshape(10, 2), [3, 4])):
        np.save(folder / f"inputs-{number}.npy", rows)
        np.save(folder / f"targets-{number}.npy", rows[:, 0].astype(np.int64))
    return Arrays(sorted(folder.glob("inputs-*.npy")), sorted(folder.glob("targets-*.npy")))


def read(dataset: Any, indices: list[int]) -> Any:
    job = Job(lambda: torch.nn.Linear(2, 2), lambda *_: None, Recipe(torch.optim.SGD, {"lr": 1.0}), dataset, 2)
    numbers = np.array(indices)
    return Rows(job)[MicroBatch(0, 0, 0, numbers, len(indices), float(len(indices)), 1.0, True, False)][1]


def test_each_kind_keeps_the_way_in_which_it_is_read(tmp_path: Path) -> None:
    inputs = torch.arange(20.0).reshape(10, 2)
    for dataset, kind in (
        (TensorDataset(inputs), TensorDataset),
        (arrays(tmp_path), PartOfArrays),
        (Subset(TensorDataset(inputs), range(9)), PartInBatches),  # type: ignore[arg-type]
        (Windows(np.arange(30), 4, 2), Part),
    ):
        part = part_of(dataset, ROWS)
        assert type(part) is kind and len(part) == 3
        assert hasattr(part, "__getitems__") == hasattr(dataset, "__getitems__")
        for found, expected in zip(read(part, [2, 0]), read(dataset, [5, 7]), strict=True):
            assert torch.equal(found, expected)


def test_floating_point_values_are_cast_and_whole_numbers_are_not(tmp_path: Path) -> None:
    inputs, targets = read(part_of(arrays(tmp_path), ROWS, torch.float64), [0, 1])
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    assert inputs.tolist() == [[14.0, 15.0], [4.0, 5.0]]


def test_an_error_names_the_row_as_the_job_numbers_it() -> None:
    with pytest.raises(ValueError, match="broken") as raised:
        read(part_of(Refusing(), ROWS), [1, 2])
    assert raised.value.__notes__ == ["sample 5"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_the_reference_reads_the_same_windows_by_its_own_code(dtype: Any) -> None:
    for array in (np.arange(30).astype(dtype), torch.arange(30).to(torch.int32)):
        dataset = Windows(array, 4, 3)
        reader, _ = with_reader(dataset)
        assert type(reader).__module__ == "samestep.reference.files" and len(reader) == len(dataset)
        for row in range(len(dataset)):
            for found, expected in zip(reader[row], dataset[row], strict=True):
                assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_the_reference_reads_the_same_arrays_by_its_own_code(tmp_path: Path) -> None:
    dataset = arrays(tmp_path)
    reader, _ = with_reader(part_of(dataset, ROWS))
    assert type(reader.dataset).__module__ == "samestep.reference.files"
    for place, row in enumerate(ROWS):
        for found, expected in zip(reader[place], dataset[row], strict=True):
            assert np.array_equal(found, expected) and type(found) is type(expected)
