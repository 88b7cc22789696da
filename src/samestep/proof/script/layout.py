"""How a script's ranks are arranged, by what each holds of the model: replicas, which train other rows, and in each the
ranks that share out its tensors. `of_replicas` makes of the ranks' records one of each replica, which holds the whole
model, so that what must hold of any data-parallel training can be asked of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.message import Message, message
from samestep.proof.script.findings import Ranks
from samestep.records.record import Record
from samestep.records.script import LOCAL_PIECE, TAKEN, MeshRecord, PieceRecord, ScriptRecord

Array = NDArray[Any]
LOCAL_KIND = LOCAL_PIECE.partition(" ")[0]


@dataclass(frozen=True)
class Layout:
    """The arrangement of the ranks of a divided model.

    replicas: the ranks of each, the first of which stands for it. tensor, data: the names of the axes along which the
    ranks of a replica lie, and along which replicas do.
    """

    replicas: list[list[int]]
    tensor: list[str]
    data: list[str]

    @classmethod
    def of(cls, ranks: Ranks) -> Layout | None:
        """Returns the layout of a model that is divided otherwise than by FSDP over all ranks; None of others."""
        if not any(rank.pieces for rank in ranks):
            return None
        sharded = {axis for rank in ranks for axis, kind, is_data in _axes(rank) if kind == "shard" and not is_data}
        groups = [{rank.rank} for rank in ranks]
        for rank in ranks:
            for piece in rank.pieces.values():
                mesh = rank.meshes[piece.mesh]
                along = [d for d, name in enumerate(mesh.names) if d >= piece.data and name in sharded]
                together = {rank.rank, *_ranks_along(mesh, rank.rank, along)}
                groups = [
                    *(group for group in groups if not group & together),
                    set().union(*(group for group in groups if group & together)),
                ]
        data = {axis: None for rank in ranks for axis, _, is_data in _axes(rank) if is_data and axis not in sharded}
        return cls(sorted(map(sorted, groups)), sorted(sharded), [*data])

    @property
    def axis(self) -> str:
        """The names of the axes of a replica's ranks."""
        return " x ".join(self.tensor)

    @property
    def data_axis(self) -> str:
        """The names of the axes of the replicas."""
        return " x ".join(self.data) or "data"

    @property
    def representatives(self) -> list[int]:
        return [replica[0] for replica in self.replicas]

    def readers(self, ranks: Ranks) -> list[int]:
        """Returns the ranks whose rows are together those of one process."""
        divides = any(rank.divides_inputs for rank in ranks)
        return [rank for replica in self.replicas for rank in (replica if divides else replica[:1])]

    def described(self) -> Message:
        """Returns what the layout is, to be told beside the findings."""
        tensor, data = self.axis or None, self.data_axis if len(self.replicas) > 1 else None
        replicas = ["+".join(map(str, replica)) for replica in self.replicas]
        return message("layout_of_ranks", replicas=replicas, tensor=tensor, data=data)


def _axes(rank: ScriptRecord) -> Iterator[tuple[str, str, bool]]:
    """Yields (name of an axis, what ranks along it hold of a parameter, whether it is FSDP's)."""
    for name, piece in rank.pieces.items():
        if name in rank.start:
            for dimension, kind in enumerate(piece.kinds):
                yield rank.meshes[piece.mesh].names[dimension], kind, dimension < piece.data


def _ranks_along(mesh: MeshRecord, rank: int, dimensions: Sequence[int]) -> list[int]:
    """Returns the ranks of a mesh that lie where `rank` does, but in some dimensions."""
    if rank not in mesh.ranks:
        return []
    numbers = np.array(mesh.ranks).reshape(mesh.shape)
    place = np.argwhere(numbers == rank)[0]
    choices = [range(size) if d in dimensions else [int(place[d])] for d, size in enumerate(mesh.shape)]
    return [int(numbers[choice]) for choice in product(*choices)]


def holders(rank: ScriptRecord, piece: PieceRecord) -> list[int]:
    """Returns the ranks whose pieces of a tensor are, together with that of `rank`, the whole."""
    dimensions = [dimension for dimension, kind in enumerate(piece.kinds) if kind != "replicate"]
    return _ranks_along(rank.meshes[piece.mesh], rank.rank, dimensions)


# One record of each replica


def of_replicas(ranks: Ranks, layout: Layout) -> list[ScriptRecord]:
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
    whole = {}
    for name, digest in digests[rank.rank].items():
        piece = rank.pieces.get(name)
        if piece is None:
            whole[name] = digest
            continue
        parts = sorted({(tuple(ranks[n].pieces[name].offset), digests[n].get(name, 0)) for n in holders(rank, piece)})
        whole[name] = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
    return whole


@dataclass(frozen=True)
class ReplicaRecord(Record):
    """The folder of a launch, as though each replica were one rank, known by the number of its first. ranks: all.

    read: the arrays of the step that was asked for last, as each question asks again.
    """

    all_ranks: Ranks = ()
    layout: Layout = field(default_factory=lambda: Layout([], [], []))
    read: dict[tuple[str, int], dict[str, Array]] = field(default_factory=dict)

    def arrays(self, name: str, rank: int = 0) -> dict[str, Array]:
        """Returns a replica's arrays: each put together of those of the ranks that hold its pieces."""
        own, record = self.of_rank(name, rank), self.all_ranks[rank]
        replica = next(replica for replica in self.layout.replicas if replica[0] == rank)
        whole = {}
        for key, array in own.items():
            is_local = key.startswith(f"{LOCAL_KIND} ")
            piece = record.pieces.get((LOCAL_PIECE if is_local else TAKEN).format(parameter_of(key)))
            if piece is None:
                whole[key] = self._of_plain(name, key, array, replica) if is_local else array
                continue
            # Along the other axes the ranks' own gradients are other replicas'.
            numbers = [number for number in holders(record, piece) if not is_local or number in replica]
            parts = [part for number in numbers if (part := self.of_rank(name, number).get(key)) is not None]
            if len(parts) == len(numbers):
                whole[key] = np.sum(parts, axis=0)
        return whole

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
    kind, _, rest = key.partition(" ")
    return rest.partition(" ")[2] if kind == LOCAL_KIND else rest


def is_near(first: Array, second: Array, close: float = 1e-5) -> bool:
    """Whether two arrays are one, but for rounding."""
    return bool(np.linalg.norm(first - second) <= close * max(np.linalg.norm(first), np.linalg.norm(second)))


def divided_by_hand(ranks: Ranks) -> list[int]:
    """Returns ranks that compute pieces of the same rows with layers that the script divides itself: they read the same
    rows, begin with other weights, and reduce in the forward pass what they compute. [] where there are none, and where
    the model says how it is divided."""
    if any(rank.pieces for rank in ranks) or not all(rank.reduces_in_forward and rank.steps for rank in ranks):
        return []
    rows = [[batch.rows for step in rank.steps[:1] for batch in step.micro_batches] for rank in ranks]
    for rank, of_rank in zip(ranks, rows):
        group = [other for other, of_other in zip(ranks, rows) if of_other == of_rank and any(of_rank)]
        if any(other.start != rank.start for other in group):
            return [other.rank for other in group]
    return []
