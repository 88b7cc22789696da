"""The optimizer state of an engine that flattens parameters: each rank's fragments of them, as in DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.rank.checkpoint_files import Saved
from samestep.rank.packed import Piece, Stored
from samestep.rank.weights import StateDict


@dataclass(frozen=True)
class Fragment:
    """A fragment of a parameter that is part of a flat one, which the optimizer has instead.

    name: the parameter's, and numel its size. flat: the flat parameter on this rank. at: the fragment's first element
    in it. start: its first element in the parameter. length: how many it has.
    """

    name: str
    numel: int
    flat: Tensor
    at: int
    start: int
    length: int


def tree_of(fragments: Sequence[Fragment], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, StateDict]:
    """Returns parameter -> key -> this rank's piece of its state, or a number. state: of the flat parameters."""
    return {
        each.name: {
            key: Piece(value[each.at : each.at + each.length].clone(), (each.numel,), (each.start,))
            if isinstance(value, Tensor) and value.shape == each.flat.shape
            else value
            for key, value in state[each.flat].items()
        }
        for each in fragments
        if each.flat in state
    }


def load(fragments: Sequence[Fragment], state: dict[Tensor, StateDict], saved: Saved) -> None:
    """Gives the flat parameters the state that a checkpoint has of their fragments."""
    for each in fragments:
        of_flat = state.get(each.flat) or {}
        for key, value in saved.state["optimizer"].get(each.name, {}).items():
            if isinstance(value, Stored) and saved.shape(value) and saved.numel(value) == each.numel:
                into = of_flat.setdefault(key, torch.zeros_like(each.flat.data))
                into[each.at : each.at + each.length] = flat_block(saved, value, each.start, each.length).to(into)
            else:
                of_flat[key] = saved.plain(value)
        if of_flat:
            state[each.flat] = of_flat


def flat_block(saved: Saved, stored: Stored, start: int, length: int) -> Tensor:
    """Returns elements of a stored tensor, counted as if it were flat. shape [length]"""
    if len(saved.shape(stored)) == 1:
        return saved.tensor(stored, (start,), (length,))
    return saved.tensor(stored).flatten()[start : start + length]
