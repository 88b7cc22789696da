"""Packed arrays come back to the last bit, and are smaller where they are close to another."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.errors import TrainingFailed
from samestep.records import packed
from samestep.records.packed import near_name, pack, unpack
from samestep.records.tensor_files import StateFile, read_arrays, write_packed, write_state

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 6e-8, -1.0)


def _random(dtype: str, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(40, 50)).astype(dtype)
    values[seed, : len(SPECIAL)] = SPECIAL
    return values


@pytest.mark.parametrize("near", [None, "float64", "float32"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_round_trip(dtype: str, near: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "AT_ONCE", 300)
    array, close = _random(dtype), None if near is None else _random(near, 1)
    stored = pack(array, close, "other")
    found = unpack(stored, close)
    assert found.tobytes() == array.tobytes() and (found.dtype, found.shape) == (array.dtype, array.shape)
    assert near_name(stored) == "other"


@pytest.mark.parametrize("array", [np.array(1.5), np.zeros((0, 3)), np.zeros(5), np.ones((4, 6))[:, ::2]])
def test_any_shape_comes_back(array: np.ndarray) -> None:
    found = unpack(pack(array))
    assert found.shape == array.shape and found.tobytes() == array.tobytes()


def test_what_is_close_is_small() -> None:
    generator = np.random.default_rng(0)
    start = generator.uniform(-0.02, 0.02, 100_000)
    end = start + 1e-5 * generator.normal(size=start.size)
    assert len(pack(end, start)) < 6.1 * start.size < 7 * start.size < len(pack(end)) < 8 * start.size
    assert len(pack(end, end)) < 500


def test_an_array_all_alike_comes_back_with_and_without_a_neighbour(tmp_path: Path) -> None:
    """It packs into nearly nothing: only what its neighbour, or its own bytes, can hold is read."""
    state = {"w": torch.zeros(1000, 1000), "small": torch.zeros(3)}
    write_state(tmp_path, 0, "start", state)
    for near in ("start", ""):
        write_packed(tmp_path, 0, "end", state, near)
        assert all(
            not array.any() and array.shape == state[name].shape
            for name, array in read_arrays(tmp_path, 0, "end").items()
        )
        assert ((tmp_path / "rank0.end.npz").stat().st_size < 10_000) == bool(near)
    claimed = pack(np.zeros((1000, 1000)))
    for near in (None, np.zeros(1), np.zeros((1000, 1001))):
        with pytest.raises(ValueError, match="larger than what is there"):
            unpack(claimed, near)


def test_a_state_is_kept_as_its_differences_from_another(tmp_path: Path) -> None:
    start = {"w": torch.randn(3, 1000), "of another shape": torch.zeros(2), "count": torch.tensor(3)}
    end = {
        "w": start["w"].double() + 1e-9,
        "of another shape": torch.ones(5),
        "count": torch.tensor(4),
        "new": torch.full((2,), 0.1, dtype=torch.bfloat16),
    }
    write_state(tmp_path, 0, "start", start)
    write_packed(tmp_path, 0, "end", end, "start")
    found = read_arrays(tmp_path, 0, "end")
    assert list(found) == list(end)
    for name, tensor in end.items():
        exact = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        assert np.array_equal(found[name], exact.numpy()) and found[name].dtype == exact.numpy().dtype
    with StateFile(tmp_path, 0, "end") as file:
        assert np.array_equal(file["w"], found["w"]) and len(file) == len(end)
    write_state(tmp_path, 0, "numerics of sgd", start)  # as an inexact engine's training is named
    assert np.array_equal(read_arrays(tmp_path, 0, "numerics of sgd")["w"], start["w"].numpy())
    (tmp_path / "rank0.start.npz").unlink()
    with pytest.raises(TrainingFailed, match=r"rank0\.start\.npz is missing"):
        read_arrays(tmp_path, 0, "end")
