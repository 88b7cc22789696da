"""The reference's tensors: how far two trainings differ, and what of one training the judge reads from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from samestep import reference
from samestep.records.reference_record import FromOne, Moved
from samestep.records.tensor_files import StateFile, write_packed, write_state
from samestep.reference import first_gradient

State = Mapping[str, Tensor]

BLOCK = 1 << 20  # elements that are compared at once: copies of the largest tensor would need a model's memory


class Written(Mapping[str, Tensor]):
    """A training's final state in its file. A tensor is read when it is asked for: the others take no memory."""

    def __init__(self, folder: Path, rank: int, key: str) -> None:
        self._file = StateFile(folder, rank, key)

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._file[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def write_training(folder: Path, rank: int, key: str, result: reference.TrainingResult, near: str = "") -> None:
    """Writes a training's final state; its first gradient's parts and the other replicas' buffers where there are.

    near: the key of a training whose final state is close to this one's. A state without such a neighbour is written as
    it is, because others are differences from it, and it is read with each of them.
    """
    if near:
        write_packed(folder, rank, key, result.state, near)
    else:
        write_state(folder, rank, key, result.state)
    tensors: dict[str, State] = {}
    if result.own:
        parts = {".own": result.own, ".before_last": result.before_last, ".own_before_last": result.own_before_last}
        tensors |= parts
    if result.life:
        tensors |= {kind: state for kind, state in result.life.tensors().items() if "buffers" not in kind}
        tensors |= {f".evaluated{number}": sample for number, sample in enumerate(result.life.samples)}
    first, *later_buffers = result.buffers
    tensors[".buffers0"] = {name: buffer for name, buffer in first.items() if name not in result.state}
    for replica, buffers in enumerate(later_buffers, 1):
        different = {name: buffer for name, buffer in buffers.items() if not _equal(buffer, first[name])}
        tensors[f".buffers{replica}"] = different
    for suffix, state in tensors.items():
        write_state(folder, rank, f"{key}{suffix}", state)


def write_start(folder: Path, rank: int, dtype: str, state: State) -> None:
    """Writes samples of the tensors that all trainings in `dtype` start from: the elements that the first gradient's
    samples have; float64 as float32 where that loses nothing."""
    write_state(folder, rank, f"start.{dtype}", {n: _shortest(first_gradient.thinned(t)) for n, t in state.items()})


def moved_from(start: State, end: State) -> dict[str, Moved]:
    """How far each tensor has moved."""
    same = (name for name, tensor in start.items() if name in end and end[name].shape == tensor.shape)
    return {name: Moved(distance(end[name], start[name]), _largest(start[name])) for name in same}


def _shortest(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float64:
        return tensor
    short = tensor.float()
    return short if all(torch.equal(a.double(), b) for a, b in _blocks(short, tensor)) else tensor


def from_plain(replicated: State, plain: State, names: list[str]) -> dict[str, FromOne]:
    """How far each of the named tensors is from plain training's."""
    return {name: FromOne(distance(replicated[name], plain[name]), _largest(replicated[name])) for name in names}


def distances(left: State, right: State) -> dict[str, float]:
    """The greatest difference of each tensor; NaN where one alone is NaN."""
    return {name: distance(tensor, right[name]) for name, tensor in left.items()}


def distance(left: Tensor, right: Tensor) -> float:
    """The greatest difference; 0 where both are the same infinity, as in a mask, or NaN, as in missing values."""
    distances = [
        torch.where((a == b) | ((a != a) & (b != b)), 0.0, (a.double() - b.double()).abs()).max()
        for a, b in _blocks(left, right)
    ]
    return float(torch.stack(distances).max()) if distances else 0.0


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    return max((float(a.double().nan_to_num(0, 0, 0).abs().max()) for (a,) in _blocks(tensor)), default=0.0)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal parts of flat tensors."""
    flat = [tensor.detach().cpu().reshape(-1) for tensor in tensors]
    return (tuple(tensor[first : first + BLOCK] for tensor in flat) for first in range(0, flat[0].numel(), BLOCK))


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.layout == right.layout and not left.is_sparse and torch.equal(left, right)
