"""Turns a tree of tensors and plain values into JSON and named tensors, and back. Nothing is pickled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.rank.shards import block_of, place_of

TENSOR, TUPLE, PAIRS, COUNTER, FLOAT = "$tensor", "$tuple", "$pairs", "$counter", "$float"


@dataclass(frozen=True)
class Piece:
    """This rank's block of a tensor. shape: of the whole tensor. offset: of the block's first element in it."""

    block: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor that is in a checkpoint's files, by its key."""

    key: str


def piece_of(tensor: Tensor) -> Piece:
    """Returns this rank's piece of a tensor, in memory that the training does not change."""
    block = block_of(tensor)
    if block.device.type == "cuda":
        copy = torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block, non_blocking=True)
    else:
        copy = block.clone(memory_format=torch.contiguous_format)
    return Piece(copy, tuple(tensor.shape), place_of(tensor)[1])


def pack(tree: Any) -> tuple[Any, dict[str, Piece]]:
    """Returns `tree` as JSON values, and its tensors by key: the path to each, as in 'optimizer/0.weight/exp_avg'.

    The tensors are copied; those on a GPU are complete after torch.cuda.synchronize(). Raises UserError for a value
    that is neither a tensor nor plain.
    """
    pieces: dict[str, Piece] = {}

    def packed(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            value = piece_of(value)
        if isinstance(value, Piece):
            pieces[path] = value
            return {TENSOR: path}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {FLOAT: repr(value)}
        if isinstance(value, Mapping):
            if all(isinstance(name, str) and not name.startswith("$") for name in value):
                return {name: packed(inner, f"{path}/{name}" if path else name) for name, inner in value.items()}
            pairs = [[name, packed(inner, f"{path}/{name}")] for name, inner in value.items()]
            return {COUNTER if isinstance(value, Counter) else PAIRS: pairs}
        if isinstance(value, list) or type(value) in (tuple, torch.Size):
            inside = [packed(inner, f"{path}/{number}") for number, inner in enumerate(value)]
            return inside if isinstance(value, list) else {TUPLE: inside}
        raise UserError(
            f"a checkpoint cannot hold {path}: it is a {type(value).__name__}; let it be a tensor, a number, a text, "
            "or a list, tuple or dict of these"
        )

    return packed(tree, ""), pieces


def unpack(packed: Any, tensor_of: Callable[[str], Any] = Stored) -> Any:
    """Returns the tree given to pack(). tensor_of: (key) -> what takes a tensor's place; Stored where not given."""
    if isinstance(packed, list):
        return [unpack(inner, tensor_of) for inner in packed]
    if not isinstance(packed, Mapping):
        return packed
    if len(packed) == 1:
        ((tag, value),) = packed.items()
        if tag == TENSOR:
            return tensor_of(value)
        if tag == FLOAT:
            return float(value)
        if tag == TUPLE:
            return tuple(unpack(inner, tensor_of) for inner in value)
        if tag in (PAIRS, COUNTER):
            pairs = {name: unpack(inner, tensor_of) for name, inner in value}
            return Counter(pairs) if tag == COUNTER else pairs
    return {name: unpack(inner, tensor_of) for name, inner in packed.items()}


def merged(trees: list[Any]) -> Any:
    """Returns the packed trees of all ranks as one. Of what several ranks have, the first one's is taken."""
    first = trees[0]
    if not isinstance(first, dict) or any(name.startswith("$") for name in first):
        return first
    of_name: dict[str, list[Any]] = {}
    for tree in trees:
        for name, value in tree.items():
            of_name.setdefault(name, []).append(value)
    return {name: merged(values) for name, values in of_name.items()}
