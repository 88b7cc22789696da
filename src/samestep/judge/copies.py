"""Compares the copies of a parameter that several ranks hold: as they begin, and after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.judge.findings import Ranks, common_steps, differs, digest, rank_apart
from samestep.message import Message, message
from samestep.records.findings import Finding


@dataclass(frozen=True)
class Copies:
    """The same elements of a parameter, and the ranks that hold them.

    name: of the parameter. holders: (rank, the parameter's name there).
    """

    name: str
    holders: Sequence[tuple[int, str]]


@dataclass(frozen=True)
class CopiesApart:
    """The first copies that are not the same.

    step: after which they are not; None: they begin so. digests: one for each holder; None where it has no such
    parameter. different: the number of parameters of which copies are not alike.
    """

    copies: Copies
    step: int | None
    digests: Sequence[int | None]
    different: int

    @property
    def rank(self) -> int:
        """The rank whose copy is not what most have."""
        return self.copies.holders[rank_apart(self.digests)][0]

    def finding(self, cause: Message, along: str | None = None) -> Finding:
        """Returns the finding about these copies. along: an axis of the mesh, or None for all ranks."""
        quantity = "initial weights" if self.step is None else "weights after the step"
        return differs(
            "initial weights" if self.step is None else "weights",
            f"{quantity} along {along}" if along else quantity,
            cause,
            step=self.step,
            tensor=self.copies.name,
            rank=self.rank,
            expected=message("same_digest_on_all_ranks"),
            found=[digest(value or 0) for value in self.digests],
        )


def copies_apart(copies: Sequence[Copies], ranks: Ranks, *, step: int | None) -> CopiesApart | None:
    """Returns the first copies that are not alike; None where all are. step: after which; None: as they begin."""
    digests = [rank.start if step is None else rank.steps[step].weights for rank in ranks]
    found = [(same, [digests[rank].get(name) for rank, name in same.holders]) for same in copies]
    apart = [(same, values) for same, values in found if len({*values}) > 1]
    if not apart:
        return None
    first, values = apart[0]
    return CopiesApart(first, step, values, different=len({same.name for same, _ in apart}))


def copies_drift_apart(copies: Sequence[Copies], ranks: Ranks) -> CopiesApart | None:
    """Returns the first copies that differ after the first step which leaves copies different; None where no step
    does."""
    found = (copies_apart(copies, ranks, step=step) for step in common_steps(ranks))
    return next((apart for apart in found if apart), None)
