"""The reference's way to read rows of Arrays and Windows: from the files and the array, not by these classes' code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class ArraysReader:
    """Rows of a samestep.Arrays by their index: the files of a column are walked one after the other."""

    def __init__(self, arrays: Any) -> None:
        self.columns = [[np.load(file, mmap_mode="r") for file in files] for files in arrays.columns]

    def __len__(self) -> int:
        return sum(map(len, self.columns[0]))

    def __getitem__(self, index: int) -> Any:
        rows = tuple(_row(files, index) for files in self.columns)
        return rows if len(rows) > 1 else rows[0]


def _row(files: list[Any], index: int) -> Any:
    for array in files:
        if index < len(array):
            return np.array(array[index])[()]
        index -= len(array)
    raise IndexError(index)


class WindowsReader:
    """Windows of a samestep.Windows by their index: the places of their tokens are counted."""

    def __init__(self, windows: Any) -> None:
        self.array, self.length, self.stride = windows.array, windows.length, windows.stride

    def __len__(self) -> int:
        return len(range(0, len(self.array) - self.length, self.stride))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        places = [index * self.stride + place for place in range(self.length)]
        return tuple(self._tokens([place + ahead for place in places]) for ahead in (0, 1))

    def _tokens(self, places: list[int]) -> Tensor:
        tokens = self.array[places]
        if isinstance(tokens, Tensor):
            return tokens if tokens.is_floating_point() else tokens.long()
        return torch.from_numpy(tokens if tokens.dtype.kind == "f" else tokens.astype(np.int64))
