"""Ranks that are no replicas, though their parameters have the same names: stages of a pipeline that a script writes
itself, each of which numbers its layers from 0."""

from __future__ import annotations

from samestep.proof.script.findings import Ranks
from samestep.records.script import ScriptRecord


def stages_that_talk(ranks: Ranks) -> list[list[ScriptRecord]]:
    """Returns the ranks of each stage: those at the same place of rows of ranks that hand matrices on from one to the
    next, between their passes, and of which only some compute a loss. [] where there are none, or where a stage is
    shared out itself."""
    if any(rank.pieces or talk.forward for rank in ranks for talk in rank.talks):
        return []
    rows = [{rank.rank} for rank in ranks]
    for talk in (talk for rank in ranks for talk in rank.talks if talk.between):
        joined = set(talk.ranks)
        together = [row for row in rows if row & joined]
        rows = [*(row for row in rows if not row & joined), joined.union(*together)]
    sizes = {len(row) for row in rows}
    if len(sizes) > 1 or sizes == {1}:
        return []
    with_loss = [{rank for rank in row if _has_loss(ranks[rank])} for row in rows]
    if not all(0 < len(of_row) < len(row) for of_row, row in zip(with_loss, rows)):
        return []
    return [[ranks[rank] for rank in stage] for stage in zip(*map(sorted, sorted(rows, key=min)))]


def _has_loss(rank: ScriptRecord) -> bool:
    return any(batch.losses for step in rank.steps for batch in step.micro_batches)


def shapes_apart(ranks: Ranks) -> str | None:
    """Returns a parameter that ranks hold in other shapes, which no replicas do; None where there is none, and where a
    library has cut the parameters."""
    if any(rank.pieces or step.sharded or step.shards for rank in ranks for step in rank.steps):
        return None
    known: dict[str, list[int]] = {}
    for name, shape in (pair for rank in ranks for pair in rank.shapes.items()):
        if known.setdefault(name, shape) != shape:
            return name
    return None
