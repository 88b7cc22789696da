"""Ranks that are no replicas, though their parameters have the same names: stages of a pipeline that a script writes
itself, each of which numbers its layers from 0; and by which norm such stages are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from samestep.message import Message, message
from samestep.proof.script.findings import Ranks, common_steps, differs
from samestep.proof.script.replay import coarser_of
from samestep.proof.script.step_gradients import norm, norm_of_all
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import BUCKETS, STEP, TAKEN, UNCLIPPED, ScriptRecord, StepRecord, of_kind

SAME_FACTOR, NEAR_FACTOR = 1e-4, 1e-2  # relative: of what one norm gives; and of what sums in another order give


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


def batch_apart(first: ScriptRecord, last: ScriptRecord) -> tuple[int, list[int] | None, list[int] | None] | None:
    """Returns the first batch of which two ranks read other rows: its number, and the rows of both; None where there is
    none. Rows with other indices are the same where their contents are."""
    for first_pass, last_pass in zip(first.passes, last.passes):
        contents = [*zip(first_pass.digests, last_pass.digests)]
        if contents and all(one == other for one, other in contents):
            continue
        for number, (rows, other_rows) in enumerate(zip(first_pass.batches, last_pass.batches)):
            if rows != other_rows:
                return number, rows, other_rows
    return None


def rows_along_stages(stages: Sequence[Ranks]) -> Finding | None:
    """Finds that the first and the last stage read other rows. Whether the last one takes its targets from them is not
    known."""
    for first, last in zip(stages[0], stages[-1]):
        if batch_apart(first, last):
            return Finding("rows", "unknown", message("stages_may_read_other_rows", ranks=[first.rank, last.rank]))
    return None


def clipped_together(stages: Sequence[Ranks], record: Record) -> Finding | None:
    """Answers 'clipping' of stages that torch's functions clip by a norm, which is to be that of all stages. None where
    no step is clipped so on each stage."""
    limits, reached, close = list[float](), 0, SAME_FACTOR * coarser_of(stages[0])
    for step in common_steps([rank for stage in stages for rank in stage]):
        factors = [clipping_factor(stage[0], record, step) for stage in stages]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(stages) or not all(clips_whole_norm(stage[0].steps[step]) for stage in stages):
            continue
        limits.append(stages[0][0].steps[step].clips[0].limit or 0.0)
        reached += min(known) < 1 - NEAR_FACTOR
        apart = next((number for number, factor in enumerate(known) if factors_apart(factor, known[0], close)), None)
        if apart is not None:
            cause = message("clipped_by_stage_norms", factors=[round(factor, 4) for factor in known])
            return _another_factor(cause, step, stages[apart], known[0], known[apart])
        wanted = _factor_of_all(stages, record, step, limits[-1])
        if wanted is not None and factors_apart(known[0], wanted, NEAR_FACTOR):
            return _another_factor(message("clipped_by_another_norm"), step, stages[0], wanted, known[0])
    if not limits:
        return None
    if not reached:
        return Finding("clipping", "unknown", message("no_step_reached_the_limit", limit=limits[0]))
    return Finding("clipping", "right", message("clipped_by_the_whole_norm", steps=reached))


def _another_factor(cause: Message, step: int, stage: Ranks, expected: float, found: float) -> Finding:
    quantity = "factor along stage"
    return differs("clipping", quantity, cause, step=step, rank=stage[0].rank, expected=expected, found=found)


def clips_whole_norm(step: StepRecord) -> bool:
    """Whether torch's function has clipped all of a rank's gradients once, by a norm."""
    by_norm = [clip for clip in step.clips if clip.limit is not None and clip.parameters >= clip.with_gradient]
    return len(step.clips) == len(by_norm) == 1


def factors_apart(factor: float, wanted: float, close: float) -> bool:
    """Whether two factors are those of clippings by other norms."""
    return abs(factor - wanted) > close * abs(wanted)


def clipping_factor(rank: ScriptRecord, record: Record, step: int) -> float | None:
    """Returns by what clipping has multiplied a rank's gradients; None where they were not clipped."""
    arrays = record.arrays(STEP.format(step), rank.rank)
    taken, before = of_kind(arrays, TAKEN), of_kind(arrays, UNCLIPPED)
    name = max(before, key=lambda parameter: norm(before[parameter]), default="")
    return norm(taken[name]) / norm(before[name]) if name in taken and norm(before[name]) else None


def _factor_of_all(stages: Sequence[Ranks], record: Record, step: int, limit: float) -> float | None:
    """Returns the factor by which the norm of all stages clips; None where sums of large tensors do not say it, and
    where stages have copies of a tied parameter, which counts once or on each."""
    arrays = [of_kind(record.arrays(STEP.format(step), stage[0].rank), UNCLIPPED) for stage in stages]
    if any(array.size >= BUCKETS for of_stage in arrays for array in of_stage.values()):
        return None
    gradients = [{array.tobytes() for array in of_stage.values() if array.any()} for of_stage in arrays]
    if len(set().union(*gradients)) < sum(map(len, gradients)):
        return None
    whole = math.hypot(*(norm_of_all(of_stage, [*of_stage]) for of_stage in arrays))
    return min(1.0, limit / (whole + 1e-6))
