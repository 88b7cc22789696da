"""Ranks that share out a model which the script divides itself, with plain tensors: layers whose columns, rows or
experts are on several ranks, or a sequence of which each computes a piece.

Nothing in such a model says how it is divided. That ranks tell each other what a forward pass computes is a reason to
try: the same script in one process has whole weights, and takes the ranks' pieces of them if they fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.message import Message, message
from samestep.proof.script.findings import Ranks, common_steps
from samestep.proof.script.replay import coarser_of
from samestep.records.divided_models import HeldPiece
from samestep.records.script import ReplayRecord, ScriptRecord

SAME_LOSS = 1e-4  # relative, in float32


@dataclass(frozen=True)
class ByHand:
    """How the ranks of such a model may be arranged.

    replicas: the ranks of each. shares_rows: whether ranks of a replica read the same rows. is_certain: whether these
    ranks are no replicas of each other in any case. is_one_model: whether they have one loss of the same rows in each
    step and other weights, so that they compute it together.
    """

    replicas: list[list[int]]
    read: list[int]
    shares_rows: bool
    is_certain: bool
    is_one_model: bool

    @classmethod
    def of(cls, ranks: Ranks) -> ByHand | None:
        """Returns how the ranks may share out a model; None where nothing says that they do."""
        is_judged = all(rank.steps and not rank.pieces and not rank.steps[0].shards for rank in ranks)
        if not is_judged or any(step.sharded for rank in ranks for step in rank.steps):
            return None
        groups = [{rank.rank} for rank in ranks]
        for rank in ranks:
            for talk in rank.talks:
                if talk.forward:
                    joined = set(talk.ranks)
                    together = [group for group in groups if group & joined]
                    groups = [*(group for group in groups if not group & joined), joined.union(*together)]
        replicas = sorted(map(sorted, groups))
        if len(replicas[0]) < 2 or len({len(replica) for replica in replicas}) > 1:
            return None
        rows, read = [_model_rows(rank) for rank in ranks], [_read_rows(rank) for rank in ranks]
        members = [[replica[0], other] for replica in replicas for other in replica[1:]]
        same_rows = any(rows[first] and rows[first] == rows[other] for first, other in members)
        same_read = any(read[first] and read[first] == read[other] for first, other in members)
        apart = any(_held(ranks[first]) != _held(ranks[other]) for first, other in members)
        exchanges = any(name.startswith(EXCHANGES) for rank in ranks for talk in rank.talks for name in talk.forward)
        if not (same_rows or same_read or apart or exchanges):
            return None
        pieces_of_rows = same_read and not same_rows
        is_certain = exchanges or pieces_of_rows or len({frozenset(rank.start) for rank in ranks}) > 1
        is_certain = is_certain or any(ranks[a].shapes != ranks[b].shapes for a, b in members)
        is_one_model = (same_rows or same_read) and apart and _have_one_loss(ranks, members)
        shares = same_rows or same_read
        readers = [
            rank
            for replica in replicas
            for place, rank in enumerate(replica)
            if not shares or not any(_is_same(read, rows, rank, other) for other in replica[:place])
        ]
        return cls(replicas, readers, shares, is_certain or is_one_model, is_one_model)

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
        replicas = ["+".join(map(str, replica)) for replica in self.replicas]
        return message("layout_of_ranks", replicas=replicas, tensor=axis, data="data" if len(replicas) > 1 else None)

    def replica_of(self, rank: int) -> list[int]:
        return next(replica for replica in self.replicas if rank in replica)


def _have_one_loss(ranks: Ranks, members: Sequence[Sequence[int]]) -> bool:
    """Whether ranks of a replica have one loss in each step. That of the first tells little: with a head that begins as
    zeros it is the same whatever the other weights are."""
    for step in common_steps(ranks):
        losses = losses_of(ranks, step)
        for values in ([losses[rank] for rank in pair] for pair in members):
            known = [value for value in values if value is not None]
            if len(known) == 2 and not math.isclose(*known, rel_tol=SAME_LOSS):
                return False
            if len(known) < 2 and step == 0:
                return False
    return True


EXCHANGES = ("all_to_all", "isend", "irecv", "send", "recv", "batch_isend")


def _model_rows(rank: ScriptRecord) -> list[list[str]]:
    return [batch.rows for batch in rank.steps[0].micro_batches if batch.rows]


def _read_rows(rank: ScriptRecord) -> list[list[str]]:
    """Returns the rows of the first batch that a rank has read to train on."""
    return [rows for loader_pass in rank.passes if loader_pass.trained for rows in loader_pass.digests[:1]]


def _is_same(read: Sequence[list[list[str]]], rows: Sequence[list[list[str]]], rank: int, other: int) -> bool:
    """Whether two ranks have read the same rows, or their models are given the same, where one reads for both."""
    return read[rank] == read[other] if read[rank] and read[other] else rows[rank] == rows[other]


def _held(rank: ScriptRecord) -> tuple[dict[str, int], dict[str, list[int]]]:
    return dict(rank.start), dict(rank.shapes)


@dataclass(frozen=True)
class Division:
    """What a replay has shown: how the model is divided. axis: 'tensor', 'expert' or 'sequence'. held: parameter of one
    process -> what each rank holds."""

    layout: ByHand
    axis: str
    held: dict[str, list[HeldPiece]]

    @classmethod
    def of(cls, layout: ByHand, ranks: Ranks, result: ReplayRecord) -> Division | None:
        """Returns the division; None where the ranks hold each the whole model, of which they compute the same."""
        held = {name: pieces for name, pieces in result.held.items()}
        divided = [name for name, pieces in held.items() if pieces[0].dimension >= 0 or len(pieces) < layout.size]
        # A sequence is divided where the ranks were given pieces of what they have read, or pass pieces on.
        if not divided and (layout.is_one_model or not layout.is_certain):
            return None
        said = {name for rank in ranks for talk in rank.talks for name in talk.forward}
        exchanges = any("all_to_all" in name for name in said)
        # Experts are whole modules, each on one rank, which has the rows of all ranks: sent to it, or gathered.
        by_module = all(held[name][0].dimension < 0 for name in divided)
        sees_all = exchanges or (by_module and any("all_gather" in name for name in said))
        are_experts = sees_all and (not layout.shares_rows or (exchanges and by_module))
        return cls(layout, "sequence" if not divided else "expert" if are_experts else "tensor", held)

    def is_divided(self, name: str) -> bool:
        """Whether ranks hold other parts of a parameter of one process."""
        return self.held[name][0].dimension >= 0 or len(self.held[name]) < self.layout.size

    @property
    def parts(self) -> list[HeldPiece]:
        """What ranks of the first replica hold alone."""
        return [piece for name, pieces in self.held.items() if self.is_divided(name) for piece in pieces]

    def described(self) -> Message:
        """Returns what the division is, to be told beside the findings."""
        return self.layout.described(self.axis)


# Whether the ranks compute what one process does


def losses_of(ranks: Ranks, step: int) -> list[float | None]:
    """Returns the sum of the losses of a step of each rank, without a gradient scaler's factor; None where one is not
    known."""
    steps = [rank.steps[step] for rank in ranks]
    values = [[batch.value for batch in of_rank.micro_batches] for of_rank in steps]
    return [
        None if None in of_rank or not of_rank else sum(v or 0.0 for v in of_rank) / (rank_step.scale or 1.0)
        for of_rank, rank_step in zip(values, steps)
    ]


def same_loss(ranks: Ranks, one_process: ScriptRecord, step: int = 0) -> bool | None:
    """Whether the mean over ranks of a step's losses is the loss of one process; None where that is not known."""
    *of_ranks, one = losses_of([*ranks, one_process], step)
    known = [value for value in of_ranks if value is not None]
    if one is None or len(known) < len(of_ranks):
        return None
    return math.isclose(sum(known) / len(known), one, rel_tol=SAME_LOSS * coarser_of(ranks))


def draw_apart(layout: ByHand, ranks: Ranks) -> bool:
    """Whether ranks of a replica draw other random numbers in the first step."""
    drawn = [[_first_draw(ranks[rank]) for rank in replica] for replica in layout.replicas]
    return any(len({*of_replica}) > 1 and "" not in of_replica for of_replica in drawn)


def _first_draw(rank: ScriptRecord) -> str:
    return rank.randoms.draws[0] if rank.randoms.draws else ""
