"""Windows into one long array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from samestep import UserError, Windows


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_windows(stride: int | None, tmp_path: Path) -> None:
    tokens = np.arange(23, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    for array in (tokens, torch.arange(23), tmp_path / "tokens.npy"):
        windows = Windows(array, 5, stride)
        starts = range(0, 23 - 5, stride or 5)
        assert len(windows) == len(starts)
        for index, start in enumerate(starts):
            inputs, targets = windows[index]
            assert inputs.tolist() == [*range(start, start + 5)] and targets.tolist() == [*range(start + 1, start + 6)]
            assert inputs.dtype == targets.dtype == torch.int64
        with pytest.raises(IndexError):
            windows[len(windows)]


def test_windows_that_cannot_be_are_refused() -> None:
    for array, length, says in (
        (np.zeros((2, 3)), 1, "one long array"),
        (np.zeros(5), 5, "need 6"),
        (np.zeros(5), 0, "1 or more"),
    ):
        with pytest.raises(UserError, match=says):
            Windows(array, length)
