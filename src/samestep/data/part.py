"""Part: some rows of a dataset, which the loader reads in the way in which it reads the dataset itself.

A proof trains a part of a job's rows. Where the loader reads them in another way than a run does, as a Subset's, the
way that each run takes is not proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from samestep.data.arrays import Arrays
from samestep.job.walk import mapped


def part_of(dataset: Any, rows: Sequence[int], dtype: torch.dtype | None = None) -> Any:
    """Returns the samples at `rows`, in their order. dtype: of their floating-point values; None: as they are."""
    if type(dataset) is TensorDataset:  # a subclass may override __getitem__
        return TensorDataset(*(cast_to(tensor[list(rows)], dtype) for tensor in dataset.tensors))
    if type(dataset) is Arrays:
        return PartOfArrays(dataset, rows, dtype)
    return PartInBatches(dataset, rows, dtype) if hasattr(dataset, "__getitems__") else Part(dataset, rows, dtype)


class Part(Dataset[Any]):
    """Rows of a dataset that is read one by one."""

    def __init__(self, dataset: Any, rows: Sequence[int], dtype: torch.dtype | None) -> None:
        self.dataset, self.rows, self.dtype = dataset, list(rows), dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return cast_to(self.dataset[self.rows[index]], self.dtype)


class PartInBatches(Part):
    """Rows of a dataset that is asked for several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = self.dataset.__getitems__([self.rows[index] for index in indices])
        return [cast_to(sample, self.dtype) for sample in samples]


class PartOfArrays(Part):
    """Rows of Arrays, which collate them."""

    def take(self, indices: NDArray[np.int64]) -> Any:
        return cast_to(self.dataset.take(np.array(self.rows)[indices]), self.dtype)


def cast_to(data: Any, dtype: torch.dtype | None) -> Any:
    """Casts every floating-point tensor, array and number in `data` to `dtype`, where there is one."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.floating) and np.issubdtype(leaf.dtype, np.floating):
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=dtype)
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return data if dtype is None else mapped(cast, data)
