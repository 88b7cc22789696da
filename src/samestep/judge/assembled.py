"""Puts the pieces that ranks hold together: the records and gradients of whole replicas, so that what must hold of any
data-parallel training can be asked of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from samestep.bounds import REDUCED_APART
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array
from samestep.judge.layout import TensorLayout, holders
from samestep.records.record import Record
from samestep.records.script import LOCAL_PIECE, TAKEN, ScriptRecord

LOCAL_KIND = LOCAL_PIECE.partition(" ")[0]


def of_replicas(ranks: Ranks, layout: TensorLayout) -> list[ScriptRecord]:
    """Returns a record of each replica: the first rank's, with digests of the whole tensors."""
    return [_of_replica(ranks, replica) for replica in layout.replicas]


def _of_replica(ranks: Ranks, replica: Sequence[int]) -> ScriptRecord:
    first, of_all = ranks[replica[0]], [ranks[rank] for rank in replica]
    starts = [rank.start for rank in ranks]
    steps = []
    for number, step in enumerate(first.steps):
        numbered = [rank.steps[number] if number < len(rank.steps) else None for rank in ranks]
        weights = [of_rank.weights if of_rank else {} for of_rank in numbered]
        moved = dict.fromkeys(name for rank in of_all if number < len(rank.steps) for name in rank.steps[number].moved)
        micro_batches = step.micro_batches
        if first.divides_inputs:
            parts = [rank.steps[number].micro_batches for rank in of_all if number < len(rank.steps)]
            micro_batches = [
                replace(batches[0], rows=[row for batch in batches for row in batch.rows]) for batches in zip(*parts)
            ]
        steps.append(
            replace(
                step,
                weights=_whole_digests(ranks, first, weights),
                moved=[*moved],
                micro_batches=micro_batches,
                sharded=False,
                splits=False,
            )
        )
    return replace(first, start=_whole_digests(ranks, first, starts), steps=steps)


def _whole_digests(ranks: Ranks, rank: ScriptRecord, digests: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Returns one digest of each tensor: of its pieces' digests, where it is divided. digests: of each rank."""
    whole_digests = {}
    for name, digest in digests[rank.rank].items():
        piece = rank.pieces.get(name)
        if piece is None:
            whole_digests[name] = digest
            continue
        parts = sorted({(tuple(ranks[n].pieces[name].offset), digests[n].get(name, 0)) for n in holders(rank, piece)})
        whole_digests[name] = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
    return whole_digests


@dataclass(frozen=True)
class ReplicaRecord(Record):
    """The folder of a launch, read as though each replica were one rank with the number of its first rank."""

    all_ranks: Ranks = ()
    """The record of each rank."""

    layout: TensorLayout = field(default_factory=lambda: TensorLayout([], [], []))
    """The replicas, and the piece of each rank."""

    read: dict[tuple[str, int], dict[str, Array]] = field(default_factory=dict)
    """The arrays of the step that was asked for last, since several questions ask for the same step."""

    def arrays(self, name: str, rank: int = 0) -> dict[str, Array]:
        """Returns a replica's arrays: each put together of those of the ranks that hold its pieces."""
        rank_arrays, record = self.of_rank(name, rank), self.all_ranks[rank]
        replica = next(replica for replica in self.layout.replicas if replica[0] == rank)
        whole_arrays = {}
        for key, array in rank_arrays.items():
            is_local = key.startswith(f"{LOCAL_KIND} ")
            piece = record.pieces.get((LOCAL_PIECE if is_local else TAKEN).format(parameter_of(key)))
            if piece is None:
                whole_arrays[key] = self._of_plain(name, key, array, replica) if is_local else array
                continue
            # Along the other axes the ranks' own gradients belong to other replicas.
            numbers = [number for number in holders(record, piece) if not is_local or number in replica]
            parts = [part for number in numbers if (part := self.of_rank(name, number).get(key)) is not None]
            if len(parts) == len(numbers):
                whole_arrays[key] = np.sum(parts, axis=0)
        return whole_arrays

    def of_rank(self, name: str, rank: int) -> dict[str, Array]:
        """Returns the arrays that one rank has written."""
        if (name, rank) not in self.read:
            for old in [key for key in self.read if key[0] != name]:
                del self.read[old]
            self.read[name, rank] = super().arrays(name, rank)
        return self.read[name, rank]

    def _of_plain(self, name: str, key: str, array: Array, replica: Sequence[int]) -> Array:
        """Returns a replica's own gradient of a parameter that each of its ranks holds whole: any rank's, or their sum
        where each has computed another one, of its piece of the rows or the sequence."""
        parts = [part for number in replica if (part := self.of_rank(name, number).get(key)) is not None]
        if all(is_near(part, parts[0]) for part in parts):
            return array
        total: Array = np.sum(parts, axis=0)
        return total


def parameter_of(key: str) -> str:
    """Returns the parameter that an array is of."""
    kind, _, name = key.partition(" ")
    return name.partition(" ")[2] if kind == LOCAL_KIND else name


def is_near(first: Array, second: Array) -> bool:
    """Returns whether two arrays are equal but for rounding."""
    return bool(np.linalg.norm(first - second) <= REDUCED_APART * max(np.linalg.norm(first), np.linalg.norm(second)))


@dataclass(frozen=True)
class SliceRecord(Record):
    """The folder of a launch, read with one gradient a replica for each parameter that all ranks of the replica hold:
    the sum of the ranks' own gradients, where each rank has computed that of its piece of a sequence."""

    replicas: list[list[int]] = field(default_factory=list)

    def arrays(self, name: str, rank: int = 0) -> dict[str, Array]:
        """Returns a rank's arrays."""
        read = super().arrays
        arrays = read(name, rank)
        replica = next(replica for replica in self.replicas if rank in replica)
        other_arrays = [read(name, other_rank) for other_rank in replica if other_rank != rank]
        for key, array in arrays.items():
            taken = TAKEN.format(parameter_of(key))
            parts = [of_rank[key] for of_rank in other_arrays if key in of_rank]
            if not key.startswith(f"{LOCAL_KIND} ") or len(parts) < len(other_arrays) or taken not in arrays:
                continue
            is_copy = all(taken in held and _is_same(held[taken], arrays[taken]) for held in other_arrays)
            if is_copy and not all(_is_same(part, array) for part in parts):
                total: Array = np.sum([array, *parts], axis=0)
                arrays[key] = total
        return arrays


def _is_same(first: Array, second: Array) -> bool:
    return first.shape == second.shape and is_near(first, second)
