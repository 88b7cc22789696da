"""Arrays and Windows: map-style datasets over memory-mapped .npy files, which may be larger than memory."""

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
from samestep.world.regular_files import check_regular

Rows = NDArray[np.generic]


class Arrays(Dataset[Any]):
    """Columns of rows: `Arrays(sorted(folder.glob("inputs-*.npy")), sorted(folder.glob("targets-*.npy")))`.

    columns: for each column its .npy files, in order, each of shape [rows, ...]; only the number of rows may differ.
    A sample is a tuple of one row per column, or the row itself where there is one column. Only the rows that are read
    are loaded into memory, and the system may drop them again; the disk and the page cache decide the speed.
    Raises UserError for files that are missing, hold objects, or differ in dtype or shape.
    """

    def __init__(self, *columns: Sequence[Path]) -> None:
        if not columns:
            raise UserError(
                "Arrays() has no columns; give a list of .npy files for each, as in Arrays(inputs, targets)"
            )
        self.columns = [list(map(Path, files)) for files in columns]
        self._open()

    def _open(self) -> None:
        self.shards = [[map_file(path) for path in files] for files in self.columns]
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
        return self.columns  # pickling a mapped array would copy all of its bytes

    def __setstate__(self, columns: list[list[Path]]) -> None:
        self.columns = columns
        self._open()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not -self.length <= index < self.length:
            raise IndexError(f"row {index} of {self.length}")
        rows = tuple(column[0].numpy()[()] for column in self._columns_at(np.array([index % self.length])))
        return rows if len(rows) > 1 else rows[0]

    def take(self, indices: NDArray[np.int64]) -> Any:
        """Returns the rows at `indices`, collated as by torch's default_collate: one tensor per column."""
        columns = self._columns_at(indices)
        return columns if len(columns) > 1 else columns[0]

    def _columns_at(self, indices: NDArray[np.int64]) -> list[Tensor]:
        tensors = []
        for arrays, ends in zip(self.shards, self.ends):
            rows = np.empty((len(indices), *arrays[0].shape[1:]), arrays[0].dtype)
            shards = np.searchsorted(ends, indices, side="right")
            for shard in np.unique(shards):
                mask = shards == shard
                rows[mask] = arrays[shard][indices[mask] - (ends[shard] - len(arrays[shard]))]
            tensors.append(torch.from_numpy(rows))
        return tensors


def map_file(path: Path) -> Rows:
    """Returns the array of a .npy file without reading it. Raises UserError for a file that holds none, or objects."""
    try:
        check_regular(path)
        array: Rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be mapped ({error}); write it with numpy.save, numbers alone") from error
    if array.ndim == 0:
        raise UserError(f"{path} holds a single number; write rows, shape [rows, ...]")
    return array


class Windows(Dataset[Any]):
    """Windows into one long array of tokens: `Windows(np.memmap("train.bin", dtype=np.uint16, mode="r"), 1024)`.

    array: one-dimensional; an array, a memory-mapped one, a tensor, or the path of a .npy file, which is mapped.
    length: of a window. stride: from one window's beginning to the next one's; None: `length`, so that each token is a
    target once; 1: every window that there is.
    A sample is (inputs, targets), each of shape [length], whole numbers as int64; the targets are one place ahead.
    Raises UserError for an array that is not one-dimensional, or shorter than a window and its last target.
    """

    def __init__(self, array: Any, length: int, stride: int | None = None) -> None:
        if isinstance(array, str | Path):
            array = map_file(Path(array))
        self.array, self.length, self.stride = array, length, length if stride is None else stride
        if getattr(array, "ndim", 0) != 1:
            raise UserError(f"Windows takes one long array, of shape [tokens], not {list(getattr(array, 'shape', []))}")
        if length < 1 or self.stride < 1:
            raise UserError(f"Windows(length={length}, stride={self.stride}): both must be 1 or more")
        if len(array) <= length:
            raise UserError(
                f"the array has {len(array)} tokens; a window of {length} and its last target need {length + 1}"
            )

    def __len__(self) -> int:
        return (len(self.array) - 1 - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        first = index % len(self) * self.stride
        cut = self.array[first : first + self.length + 1]
        tokens = cut if isinstance(cut, Tensor) else torch.from_numpy(np.array(cut, dtype=_readable(cut.dtype)))
        tokens = tokens if tokens.is_floating_point() else tokens.long()
        return tokens[:-1], tokens[1:]


def _readable(dtype: Any) -> Any:
    """Returns the dtype to copy an array's values in: torch does not compute with unsigned ones."""
    return np.int64 if np.issubdtype(dtype, np.integer) else dtype
