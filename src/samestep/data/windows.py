"""Windows: a map-style dataset of windows into one long array, for language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.data.arrays import map_file
from samestep.errors import UserError


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
