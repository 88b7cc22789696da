"""Puts together the weights of a model that a script divides itself, from the parts of its ranks.

Only the model of one process, in a replay, shows how it is divided: a parameter that has the shape of the ranks' is a
copy on each of them, a longer one is made of theirs along the dimension in which it is longer, and a module that one
process has and a rank has not is another rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from samestep.records.divided_models import HeldPiece
from samestep.records.tensor_files import read_arrays

Held = Mapping[str, list[HeldPiece]]


class WholeWeights:
    """The weights of one replica. ranks: those of the replica."""

    def __init__(self, folder: Path, ranks: Sequence[int], names: Sequence[str]) -> None:
        self.ranks = ranks
        self.held: dict[str, list[HeldPiece]] = {}
        self._arrays = {
            name: [{k: torch.from_numpy(a) for k, a in read_arrays(folder, rank, name).items()} for rank in ranks]
            for name in names
        }

    def add(self, named: Mapping[str, Tensor]) -> str | None:
        """Notes what each rank holds of the parameters of one process; returns the name of one that cannot be put
        together of it."""
        first = next(iter(self._arrays.values()))
        shapes = [{key: tuple(tensor.shape) for key, tensor in of_rank.items()} for of_rank in first]
        numbered = numbered_modules({name: tuple(p.shape) for name, p in named.items()}, shapes)
        for name, parameter in named.items():
            pieces = held_pieces(name, tuple(parameter.shape), shapes, numbered)
            if pieces is None:
                return name
            self.held[name] = [
                HeldPiece(self.ranks[place], held, dimension, start, length)
                for place, held, dimension, start, length in pieces
            ]
        return None

    def whole(self, state: str) -> dict[str, Tensor]:
        """Returns the parameters as one process has them. state: which of the arrays."""
        arrays = dict(zip(self.ranks, self._arrays[state]))
        together = {}
        for name, pieces in self.held.items():
            parts = [arrays[piece.rank][piece.name] for piece in pieces if piece.name in arrays[piece.rank]]
            if len(parts) == len(pieces):
                along = pieces[0].dimension
                together[name] = parts[0] if along < 0 else torch.cat(parts, along)
        return together

    def buffers(self, state: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._arrays[state][0].items() if name.startswith("buffer ")}

    def cut(self, name: str, gradient: Tensor) -> dict[str, Tensor]:
        """Returns each rank's part of a full gradient, by the rank and the name on that rank."""
        parts = {}
        for piece in self.held.get(name, ()):
            part = gradient if piece.dimension < 0 else gradient.narrow(piece.dimension, piece.start, piece.length)
            parts[of_rank(piece.rank, piece.name)] = part
        return parts


def of_rank(rank: int, name: str) -> str:
    """Returns the name of what a rank holds, among those of a replay."""
    return f"rank {rank}: {name}"


Shapes = Mapping[str, tuple[int, ...]]
Place = tuple[int, str, int, int, int]  # rank, name on it, dimension, start and length along it


def held_pieces(
    name: str, shape: tuple[int, ...], ranks: Sequence[Shapes], numbered: Mapping[str, tuple[int, str]]
) -> list[Place] | None:
    """Returns what each rank holds of a parameter; None where it cannot be put together of that.

    numbered: of a module's parameters that the ranks number anew, the place of the rank and the name there.
    """
    if name in numbered:
        holder, name_there = numbered[name]
        return [(holder, name_there, -1, 0, 0)]
    places = [place for place, of_rank in enumerate(ranks) if name in of_rank]
    shapes = [ranks[place][name] for place in places]
    if not places:
        return None
    if all(held == shape for held in shapes):
        return [(place, name, -1, 0, 0) for place in places]
    if any(len(held) != len(shape) for held in shapes):
        return None
    longer = [d for d in range(len(shape)) if any(held[d] != shape[d] for held in shapes)]
    if len(longer) != 1:
        return None
    dimension, pieces, start = longer[0], list[Place](), 0
    for place, held in zip(places, shapes):
        pieces.append((place, name, dimension, start, held[dimension]))
        start += held[dimension]
    return pieces if start == shape[dimension] else None


def numbered_modules(whole_shapes: Shapes, ranks: Sequence[Shapes]) -> dict[str, tuple[int, str]]:
    """Returns the parameters of modules that each rank numbers from 0, and one process goes on numbering, as experts:
    name in one process -> (place of the rank, name there)."""
    lists: dict[str, set[int]] = {}  # 'experts.' -> numbers of its modules in one process
    for name in whole_shapes:
        words = name.split(".")
        for place, word in enumerate(words):
            if word.isdigit():
                lists.setdefault(".".join([*words[:place], ""]), set()).add(int(word))
    found = {}
    for prefix, numbers in lists.items():
        held = [{int(n.removeprefix(prefix).split(".")[0]) for n in r if _is_below(n, prefix)} for r in ranks]
        per_rank = len(held[0])
        are_local = per_rank and all(numbers_held == {*range(per_rank)} for numbers_held in held)
        if not are_local or numbers != {*range(per_rank * len(ranks))} or len(ranks) < 2:
            continue
        for name in (name for name in whole_shapes if _is_below(name, prefix)):
            number, _, tensor = name.removeprefix(prefix).partition(".")
            place, local = divmod(int(number), per_rank)
            found[name] = place, f"{prefix}{local}.{tensor}"
    return found


def _is_below(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).split(".")[0].isdigit()
