"""Finds how a script's ranks are arranged: which of them hold the whole model together, and the part of each.

The judge, the replay and the command ask `Layout`, which decides it by the ranks' records. How a model that a script
divides by hand is cut is known only after its replay: see by_hand.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from samestep.bounds import LOSS_APART_OF_PIECES
from samestep.judge.findings import Ranks, common_steps
from samestep.judge.losses import losses_of
from samestep.message import Message, message
from samestep.records.divided_models import MeshRecord, PieceRecord
from samestep.records.script import ScriptRecord
from samestep.records.torch_collectives import WITH_HISTORY, exchanges_parts

Kind = Literal["pipeline", "tensors", "stages", "other shapes", "by hand", "replicas"]


@dataclass(frozen=True)
class Layout:
    """The arrangement of a script's ranks."""

    kind: Kind
    """'pipeline': a pipeline of torch.distributed.pipelining. 'tensors': DTensors or FSDP say what each rank holds.
    'stages': the script itself hands stages on from rank to rank. 'other shapes': ranks hold a parameter in different
    shapes, which no replicas do; nothing more is known. 'by hand': ranks certainly share out layers that the script
    divides. 'replicas': each rank holds a whole model."""

    pipeline: PipelineLayout | None = None
    """The arrangement of the pipeline's ranks. None: there is no pipeline."""

    tensors: TensorLayout | None = None
    """The arrangement that DTensors or FSDP say. None: they say none."""

    stages: Sequence[Ranks] = ()
    """The ranks of each stage. Empty for kinds without stages."""

    by_hand: ByHand | None = None
    """How ranks of any kind but a pipeline may share out a model, which a replay tells. None: nothing says that they
    do."""

    pieces: Sequence[int] = ()
    """The ranks of one replica, for the kind 'by hand'. Empty for other kinds."""

    other_shape: str = ""
    """A parameter that ranks hold in different shapes. '': there is none."""

    @classmethod
    def of(cls, ranks: Ranks) -> Layout:
        """Returns what the ranks' records say."""
        tensors = TensorLayout.of(ranks)
        if pipeline := PipelineLayout.of(ranks):
            return cls("pipeline", pipeline, tensors, pipeline.stages(ranks))
        if tensors:
            return cls("tensors", tensors=tensors)
        by_hand = ByHand.of(ranks)
        if len(stages := _stages(ranks)) > 1:
            return cls("stages", stages=stages, by_hand=by_hand)
        if parameter := _other_shape(ranks):
            return cls("other shapes", by_hand=by_hand, other_shape=parameter)
        pieces = by_hand.replicas[0] if by_hand and by_hand.is_certain else _ranks_that_reduce(ranks)
        return cls("by hand" if pieces else "replicas", by_hand=by_hand, pieces=pieces)

    def described(self, ranks: Ranks) -> list[Message]:
        """Returns a description of the layout, to be printed with the findings, without what only a replay shows."""
        said = [self.tensors.described()] if self.tensors else []
        return [*said, self.pipeline.described(ranks)] if self.pipeline else said


def _joined(ranks: Iterable[int], groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Returns the ranks in the sets that groups make of them which have a rank in common."""
    joined = [{rank} for rank in ranks]
    for group in groups:
        members = {*group}
        together = [known for known in joined if known & members]
        joined = [*(known for known in joined if not known & members), members.union(*together)]
    return sorted(map(sorted, joined))


def _names(replicas: Sequence[Sequence[int]]) -> list[str]:
    return ["+".join(map(str, replica)) for replica in replicas]


# Tensors that know how they are divided


@dataclass(frozen=True)
class TensorLayout:
    """The arrangement of the ranks of a divided model.

    replicas: the ranks of each, the first of which stands for it. tensor, data: the names of the axes along which the
    ranks of a replica lie, and along which replicas do.
    """

    replicas: list[list[int]]
    tensor: list[str]
    data: list[str]

    @classmethod
    def of(cls, ranks: Ranks) -> TensorLayout | None:
        """Returns the layout of a model that is divided otherwise than by FSDP over all ranks; None of others."""
        if not any(rank.pieces for rank in ranks):
            return None
        sharded = {axis for rank in ranks for axis, kind, is_data in _axes(rank) if kind == "shard" and not is_data}
        groups = []
        for rank in ranks:
            for piece in rank.pieces.values():
                mesh = rank.meshes[piece.mesh]
                along = [d for d, name in enumerate(mesh.names) if d >= piece.data and name in sharded]
                groups.append([rank.rank, *_ranks_along(mesh, rank.rank, along)])
        data = {axis: None for rank in ranks for axis, _, is_data in _axes(rank) if is_data and axis not in sharded}
        replicas = _joined((rank.rank for rank in ranks), groups)
        return cls(replicas, sorted(sharded), [*data])

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
        return message("layout_of_ranks", replicas=_names(self.replicas), tensor=tensor, data=data)


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


# Layers that the script divides itself


@dataclass(frozen=True)
class ByHand:
    """How the ranks of a model whose layers the script divides itself may be arranged."""

    replicas: list[list[int]]
    """The ranks of each replica."""

    read: list[int]
    """The ranks whose rows are together those of one process."""

    shares_rows: bool
    """Whether ranks of a replica read the same rows."""

    is_certain: bool
    """Whether the ranks of a replica are certainly not replicas of each other."""

    is_one_model: bool
    """Whether the ranks of a replica have one loss of the same rows in each step and different weights, so that they
    compute it together."""

    holds_own: bool = False
    """Whether all that tells so is that ranks of other rows hand each other what they compute, and keep some parameters
    apart, as experts. Of these one process may have as many as a rank: it is no whole model then."""

    @classmethod
    def of(cls, ranks: Ranks) -> ByHand | None:
        """Returns how the ranks may share out a model; None where nothing says that they do."""
        is_judged = all(rank.steps and not rank.pieces and not rank.steps[0].shards for rank in ranks)
        if not is_judged or any(step.sharded for rank in ranks for step in rank.steps):
            return None
        talks = [talk for rank in ranks for talk in rank.talks if talk.forward]
        replicas = _joined((rank.rank for rank in ranks), (talk.ranks for talk in talks))
        if len(replicas[0]) < 2 or len({len(replica) for replica in replicas}) > 1:
            return None
        rows, read = [_model_rows(rank) for rank in ranks], [_read_rows(rank) for rank in ranks]
        members = [[replica[0], other_rank] for replica in replicas for other_rank in replica[1:]]
        same_rows = any(rows[first] and rows[first] == rows[other_rank] for first, other_rank in members)
        same_read = any(read[first] and read[first] == read[other_rank] for first, other_rank in members)
        apart = any(_held(ranks[first]) != _held(ranks[other_rank]) for first, other_rank in members)
        exchanges = any(exchanges_parts(name) for talk in talks for name in talk.forward)
        own = any(_hold_own([ranks[rank] for rank in replica]) for replica in replicas)
        own = own and not (same_rows or same_read or exchanges)
        if not (same_rows or same_read or apart or exchanges or own):
            return None
        pieces_of_rows = same_read and not same_rows
        is_certain = exchanges or pieces_of_rows or len({frozenset(rank.start) for rank in ranks}) > 1
        is_certain = is_certain or any(ranks[a].shapes != ranks[b].shapes for a, b in members)
        own = own and not is_certain
        is_one_model = (same_rows or same_read) and apart and _have_one_loss(ranks, members)
        shares = same_rows or same_read
        readers = [
            rank
            for replica in replicas
            for place, rank in enumerate(replica)
            if not shares or not any(_is_same(read, rows, rank, other_rank) for other_rank in replica[:place])
        ]
        return cls(replicas, readers, shares, is_certain or is_one_model or own, is_one_model, own)

    def readers(self, ranks: Ranks) -> list[int]:
        """Returns the ranks whose rows are together those of one process."""
        return self.read

    @property
    def size(self) -> int:
        """How many ranks share out a model."""
        return len(self.replicas[0])

    def like(self, rank: int) -> int:
        """Returns the rank of the first replica that holds what `rank` does in its own."""
        replica = next(replica for replica in self.replicas if rank in replica)
        return self.replicas[0][replica.index(rank)]

    def same(self, rank: int) -> list[int]:
        """Returns the ranks of all replicas that hold what `rank` does."""
        return [replica[self.replicas[0].index(self.like(rank))] for replica in self.replicas]

    def described(self, axis: str = "tensor") -> Message:
        """Returns how the ranks are arranged, to be told beside the findings."""
        replicas = _names(self.replicas)
        return message("layout_of_ranks", replicas=replicas, tensor=axis, data="data" if len(replicas) > 1 else None)

    def replica_of(self, rank: int) -> list[int]:
        return next(replica for replica in self.replicas if rank in replica)


def compute_together(ranks: Ranks) -> bool:
    """Returns whether ranks hand each other, in training forwards or for their losses, tensors of which gradients come
    back: what one rank computes is then of others' rows, or of others' parts of the same rows."""
    return any(
        talk.forward and (talk.backward or any(name.endswith(WITH_HISTORY) for name in talk.forward))
        for rank in ranks
        for talk in rank.talks
    ) or any(step.gathers for rank in ranks for step in rank.steps[:1])


def _hold_own(ranks: Ranks) -> bool:
    """Returns whether ranks that compute together keep some parameters apart, as their own experts, and the others
    alike."""
    if not compute_together(ranks) or not (steps := common_steps(ranks)):
        return False
    first, *others = [rank.steps[steps[-1]].weights for rank in ranks]
    apart = [name for name in first if any(of_rank.get(name) != first[name] for of_rank in others)]
    return 0 < len(apart) < len(first)


def _have_one_loss(ranks: Ranks, members: Sequence[Sequence[int]]) -> bool:
    """Returns whether ranks of a replica have one loss in each step. The loss of the first step tells little: with a
    head that begins as zeros it is the same whatever the other weights are."""
    for step in common_steps(ranks):
        losses = losses_of(ranks, step)
        for values in ([losses[rank] for rank in pair] for pair in members):
            known = [value for value in values if value is not None]
            if len(known) == 2 and not math.isclose(*known, rel_tol=LOSS_APART_OF_PIECES):
                return False
            if len(known) < 2 and step == 0:
                return False
    return True


def _model_rows(rank: ScriptRecord) -> list[list[str]]:
    return [batch.rows for batch in rank.steps[0].micro_batches if batch.rows]


def _read_rows(rank: ScriptRecord) -> list[list[str]]:
    """Returns the rows of the first batch that a rank has read to train on."""
    return [rows for loader_pass in rank.passes if loader_pass.trained for rows in loader_pass.digests[:1]]


def _is_same(read: Sequence[list[list[str]]], rows: Sequence[list[list[str]]], rank: int, other_rank: int) -> bool:
    """Returns whether two ranks have read the same rows, or their models are given the same, where one reads for
    both."""
    return read[rank] == read[other_rank] if read[rank] and read[other_rank] else rows[rank] == rows[other_rank]


def _held(rank: ScriptRecord) -> tuple[dict[str, int], dict[str, list[int]]]:
    return dict(rank.start), dict(rank.shapes)


def _ranks_that_reduce(ranks: Ranks) -> list[int]:
    """Returns ranks that compute pieces of the same rows with layers that the script divides itself: they read the same
    rows, begin with other weights, and reduce in the forward pass what they compute. [] where there are none, and where
    the model says how it is divided."""
    if any(rank.pieces for rank in ranks) or not all(rank.reduces_in_forward and rank.steps for rank in ranks):
        return []
    rows = [[batch.rows for step in rank.steps[:1] for batch in step.micro_batches] for rank in ranks]
    for rank, of_rank in zip(ranks, rows):
        group = [member for member, of_other in zip(ranks, rows) if of_other == of_rank and any(of_rank)]
        if any(member.start != rank.start for member in group):
            return [member.rank for member in group]
    return []


# Stages of a pipeline


@dataclass(frozen=True)
class PipelineLayout:
    """The arrangement of ranks that hold stages. replicas: the ranks of each pipeline. holders: of each stage. missing:
    why they are no whole pipelines; None where they are."""

    replicas: list[list[int]]
    holders: list[list[int]]
    missing: Message | None = None

    @classmethod
    def of(cls, ranks: Ranks) -> PipelineLayout | None:
        """Returns the layout of a pipeline of torch.distributed.pipelining; None of other scripts."""
        if not any(rank.stages for rank in ranks):
            return None
        groups = [*dict.fromkeys(tuple(stage.ranks) for rank in ranks for stage in rank.stages)]
        count = max(stage.stages for rank in ranks for stage in rank.stages)
        holders = [
            [rank.rank for rank in ranks if any(s.index == index for s in rank.stages)] for index in range(count)
        ]
        missing = None
        for group in groups:
            held = sorted(stage.index for number in group for stage in ranks[number].stages)
            if held != [*range(count)]:
                missing = message("stages_are_missing", stages=count, held=held)
        if sorted(number for group in groups for number in group) != [*range(len(ranks))]:
            missing = missing or message("stages_are_missing", stages=count, held=[*range(count)])
        return cls(sorted(map(list, groups)), holders, missing)

    def described(self, ranks: Ranks) -> Message:
        """Returns what the layout is, to be told beside the findings."""
        kind = next(stage.schedule for rank in ranks for stage in rank.stages)
        replicas = _names(self.replicas)
        return message("pipeline_of_ranks", schedule=kind, stages=len(self.holders), replicas=replicas)

    def stages(self, ranks: Ranks) -> list[list[ScriptRecord]]:
        """Returns the ranks that hold the same stages, once each; all as one where stages are missing."""
        if self.missing:
            return [[*ranks]]
        groups = dict.fromkeys(tuple(holders) for holders in self.holders)
        return [[ranks[number] for number in group] for group in groups]


def _stages(ranks: Ranks) -> list[list[ScriptRecord]]:
    """Returns the ranks of each stage: a stage shares no parameter with another one, or hands on what it computes.
    Returns all ranks as one stage where there are no stages."""
    if handing_on := _stages_that_talk(ranks):
        return handing_on
    stages: dict[frozenset[str], list[ScriptRecord]] = {}
    for rank in ranks:
        held = frozenset(rank.start).union(*((*step.weights, *step.shards) for step in rank.steps))
        stages.setdefault(held, []).append(rank)
    count = sum(map(len, stages))
    return [*stages.values()] if all(stages) and count == len(frozenset().union(*stages)) else [[*ranks]]


def _stages_that_talk(ranks: Ranks) -> list[list[ScriptRecord]]:
    """Returns the ranks of each stage: those at the same place of rows of ranks that hand matrices on from one to the
    next, between their passes, and of which only some compute a loss. [] where there are none, or where a stage is
    shared out itself."""
    if any(rank.pieces or talk.forward for rank in ranks for talk in rank.talks):
        return []
    talks = [talk for rank in ranks for talk in rank.talks if talk.between]
    rows = _joined((rank.rank for rank in ranks), (talk.ranks for talk in talks))
    sizes = {len(row) for row in rows}
    if len(sizes) > 1 or sizes == {1}:
        return []
    with_loss = [{rank for rank in row if has_loss(ranks[rank])} for row in rows]
    if not all(0 < len(of_row) < len(row) for of_row, row in zip(with_loss, rows)):
        return []
    return [[ranks[rank] for rank in stage] for stage in zip(*rows)]


def has_loss(rank: ScriptRecord) -> bool:
    """Returns whether a rank computes a loss, as the last stage of a pipeline does."""
    return any(batch.losses for step in rank.steps for batch in step.micro_batches)


def _other_shape(ranks: Ranks) -> str | None:
    """Returns a parameter that ranks hold in other shapes, which no replicas do; None where there is none, and where a
    library has cut the parameters."""
    if any(rank.pieces or step.sharded or step.shards for rank in ranks for step in rank.steps):
        return None
    known: dict[str, list[int]] = {}
    for name, shape in (pair for rank in ranks for pair in rank.shapes.items()):
        if known.setdefault(name, shape) != shape:
            return name
    return None
