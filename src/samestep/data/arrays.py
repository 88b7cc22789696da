"""Arrays on the disk: more rows than memory holds, from memory-mapped .npy files, as one map-style dataset."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from samestep.errors import UserError

Rows = NDArray[np.generic]


class Arrays(Dataset[Any]):
    """Columns of rows: `Arrays(sorted(folder.glob("inputs-*.npy")), sorted(folder.glob("targets-*.npy")))`.

    columns: for each, its .npy files, which follow one another; shape [rows, ...], alike but for the rows. A sample is
    a row of each column, or just the row where there is one column. Only what is asked for is read, and the system
    may forget it again: what counts is the disk's speed, and the page cache's size.
    Raises UserError for files that are missing, hold objects, or do not fit together.
    """

    def __init__(self, *columns: Sequence[Path]) -> None:
        if not columns:
            raise UserError(
                "Arrays() has no columns; give a list of .npy files for each, as in Arrays(inputs, targets)"
            )
        self.columns = [list(map(Path, files)) for files in columns]
        self._open()

    def _open(self) -> None:
        self.shards = [[_mapped(path) for path in files] for files in self.columns]
        for files, arrays in zip(self.columns, self.shards):
            if not arrays:
                raise UserError(
                    "a column has no .npy files; give at least one, as in sorted(folder.glob('inputs-*.npy'))"
                )
            for path, array in zip(files, arrays):
                if (array.dtype, array.shape[1:]) != (arrays[0].dtype, arrays[0].shape[1:]):
                    raise UserError(
                        f"{path} holds rows of {array.dtype}{list(array.shape[1:])}, and {files[0]} rows of "
                        f"{arrays[0].dtype}{list(arrays[0].shape[1:])}; write one column's files alike"
                    )
        self.ends = [np.array(list(accumulate(map(len, arrays)))) for arrays in self.shards]
        lengths = [int(ends[-1]) for ends in self.ends]
        if len({*lengths}) != 1:
            raise UserError(f"the columns hold {', '.join(map(str, lengths))} rows; give each of them the same number")
        self.length = lengths[0]

    def __getstate__(self) -> list[list[Path]]:
        return self.columns  # pickled, a mapped array would become all of its bytes

    def __setstate__(self, columns: list[list[Path]]) -> None:
        self.columns = columns
        self._open()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not -self.length <= index < self.length:
            raise IndexError(f"row {index} of {self.length}")
        rows = tuple(column[0].numpy()[()] for column in self._taken(np.array([index % self.length])))
        return rows if len(rows) > 1 else rows[0]

    def take(self, indices: NDArray[np.int64]) -> Any:
        """The rows at `indices`, as torch's default collate would give them: a tensor of each column."""
        taken = self._taken(indices)
        return taken if len(taken) > 1 else taken[0]

    def _taken(self, indices: NDArray[np.int64]) -> list[Tensor]:
        found = []
        for arrays, ends in zip(self.shards, self.ends):
            rows = np.empty((len(indices), *arrays[0].shape[1:]), arrays[0].dtype)
            shards = np.searchsorted(ends, indices, side="right")
            for shard in np.unique(shards):
                here = shards == shard
                rows[here] = arrays[shard][indices[here] - (ends[shard] - len(arrays[shard]))]
            found.append(torch.from_numpy(rows))
        return found


def _mapped(path: Path) -> Rows:
    try:
        array: Rows = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be mapped ({error}); write it with numpy.save, numbers alone") from error
    if array.ndim == 0:
        raise UserError(f"{path} holds a single number; write rows, shape [rows, ...]")
    return array
