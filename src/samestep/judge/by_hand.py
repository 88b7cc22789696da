"""Ranks that share out a model which the script divides itself, with plain tensors: layers whose columns, rows or
experts are on several ranks, or a sequence of which each computes a piece.

Nothing in such a model says how it is divided. That ranks tell each other what a forward pass computes is a reason to
try: the same script in one process has whole weights, and takes the ranks' pieces of them if they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.judge.findings import Ranks
from samestep.judge.layout import ByHand
from samestep.message import Message
from samestep.records.divided_models import HeldPiece
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import ReplayRecord


@dataclass(frozen=True)
class Division:
    """How a model is divided, as a replay has shown. axis: 'tensor', 'expert' or 'sequence'. held: parameter of one
    process -> the part on each rank."""

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
        """Returns whether ranks hold other parts of a parameter of one process."""
        return self.held[name][0].dimension >= 0 or len(self.held[name]) < self.layout.size

    @property
    def parts(self) -> list[HeldPiece]:
        """What ranks of the first replica hold alone."""
        return [piece for name, pieces in self.held.items() if self.is_divided(name) for piece in pieces]

    def described(self) -> Message:
        """Returns what the division is, to be told beside the findings."""
        return self.layout.described(self.axis)


def draw_apart(layout: ByHand, ranks: Ranks) -> bool:
    """Returns whether ranks of a replica draw other random numbers in the first step."""
    drawn = [[_first_draw(ranks[rank]) for rank in replica] for replica in layout.replicas]
    return any(len({*of_replica}) > 1 and "" not in of_replica for of_replica in drawn)


def _first_draw(rank: ScriptRecord) -> str:
    return rank.randoms.draws[0] if rank.randoms.draws else ""
