"""Weights as files: read strictly, buffers too, and never written by halves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from samestep.errors import UserError
from samestep.rank.weights import model_with_weights, save


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A model that has trained a little, so that its buffers are no longer those of a new one."""
    model = net()
    model(torch.ones(5, 3) + torch.arange(5)[:, None])
    with torch.no_grad():
        model[0].weight.add_(1)
    save(model.state_dict(), tmp_path / "weights.safetensors")
    return model, tmp_path / "weights.safetensors"


def test_parameters_and_buffers_come_back(saved: tuple[nn.Module, Path]) -> None:
    model, file = saved
    found = model_with_weights(net, file).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(found["1.running_mean"], net().state_dict()["1.running_mean"])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: net().double(), "torch.float32 in the file and torch.float64 in the model; save it in that dtype"),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), r"has shape \[4, 3\] in the file and \[5, 3\] in "),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "it has no 2.bias, 2.weight"),
        (lambda: nn.Sequential(nn.Linear(3, 4)), "the model has no 1.bias, 1.num_batches_tracked, .* …"),
    ],
)
def test_what_does_not_fit_is_named(other: object, says: str, saved: tuple[nn.Module, Path]) -> None:
    with pytest.raises(UserError, match=says):
        model_with_weights(other, saved[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_the_file_is_for_those_whom_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save(net().state_dict(), tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "weights.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_writing_that_breaks_leaves_what_was_there(
    saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensors: object, file: Path) -> None:
        Path(file).write_bytes(b"the first half")
        raise OSError("No space left on device")

    before = saved[1].read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(UserError, match=r"cannot be written"):
        save(net().state_dict(), saved[1])
    assert saved[1].read_bytes() == before
