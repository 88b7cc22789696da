"""Judges how gradients are clipped: once a step, after their reduction, and by one norm of all gradients on all
ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from samestep.bounds import CLIPPED_APART, CLIPPED_APART_BY_SUMS, SMALLEST_FLOAT32
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.judge.fit import norm
from samestep.judge.layout import ByHand
from samestep.judge.step_gradients import (
    arrays_of_ranks,
    clipping_factor,
    coarser_of,
    norm_of_all,
    whole_gradients,
)
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import BUCKETS, STEP, TAKEN, UNCLIPPED, ClipRecord, StepRecord, of_kind


def clipping(ranks: Ranks, record: Record) -> Finding:
    """Judges whether the reduced gradient is clipped once a step, and by the norm of all parameters."""
    question: Question = "clipping"
    clipped = 0
    for step in common_steps(ranks):
        if not any(rank.steps[step].clips for rank in ranks):
            continue
        clipped += 1
        if any(clip.of_pieces and clip.limit is not None for clip in ranks[0].steps[step].clips):
            cause = message("clipped_by_norm_of_own_pieces")
            whole, pieces = message("norm_of_all_pieces"), message("norm_of_own_pieces")
            return differs(question, "clipping", cause, step=step, rank=0, expected=whole, found=pieces)
        clips, micro_batches = ranks[0].steps[step].clips, len(ranks[0].steps[step].micro_batches)
        # A clipping before the first backward pass limits nothing, and does no harm beside another one.
        after = [clip.after for clip in clips if clip.after] or [0]
        if min(after) < micro_batches:
            return _clipped_early(step, after, micro_batches)
        if finding := _clipped_norms(step, clips, record, ranks):
            return finding
    late = sum(step.late_clips for step in ranks[0].steps)
    if late and not clipped:
        return Finding(question, "warning", message("clipped_after_the_step", clips=late))
    if not clipped:
        return Finding(question, "right", message("nothing_is_clipped"))
    return Finding(question, "right", message("clipped_once_a_step", steps=clipped))


def _clipped_early(step: int, after: Sequence[int], micro_batches: int) -> Finding:
    """Returns the finding about a gradient that is clipped before it is whole. after: micro-batches, of each clip."""
    if len(after) > 1:
        cause = message("clipped_after_each_micro_batch", clips=len(after))
        return differs("clipping", "clipping", cause, step=step, rank=0, expected=1, found=len(after))
    cause = message("clipped_before_last_micro_batch", micro_batch=after[0] - 1, micro_batches=micro_batches)
    if not after[0]:
        cause = message("clipped_before_backward")
    what = "micro-batches before the clipping"
    return differs("clipping", what, cause, step=step, rank=0, expected=micro_batches, found=after[0])


def _clipped_norms(step: int, clips: Sequence[ClipRecord], record: Record, ranks: Ranks) -> Finding | None:
    """Finds a gradient that was not clipped by the norm of all parameters."""
    by_norm = [clip for clip in clips if clip.limit is not None]
    if len(by_norm) > 1 and all(clip.parameters < clip.with_gradient for clip in by_norm):
        cause, expected = message("clipped_in_parts", parts=len(by_norm)), message("norms_of_parts", parts=1)
        parts = message("norms_of_parts", parts=len(by_norm))
        return differs("clipping", "clipping", cause, step=step, rank=0, expected=expected, found=parts)
    if len(by_norm) != 1 or by_norm[0].parameters < by_norm[0].with_gradient:
        return None
    limit = by_norm[0].limit
    assert limit is not None
    first, arrays = ranks[0].steps[step], arrays_of_ranks(record, ranks, step)
    unclipped, clipped = (whole_gradients(arrays, kind, first.shards) for kind in (UNCLIPPED, TAKEN))
    for rank, (before, taken) in enumerate(zip(unclipped, clipped)):
        # The norm of a large tensor is not known from its sums.
        if not before or any(array.size >= BUCKETS for array in before.values()):
            return None
        wanted = clipping_factor(limit, norm_of_all(before, [*before]))
        name = max(before, key=lambda parameter: norm(before[parameter]))
        largest = norm(before[name])
        ratio = norm(taken[name]) / largest if largest else wanted
        if abs(ratio / wanted - 1) <= CLIPPED_APART_BY_SUMS:
            continue
        cause = message("clipped_by_another_norm")
        scaled = wanted * largest / (first.scale or 1.0)
        # A bound for gradients that a large factor divides after the clipping.
        rounding = taken[name].size ** 0.5 * SMALLEST_FLOAT32
        if first.scale and abs(norm(taken[name]) - scaled) <= max(CLIPPED_APART_BY_SUMS * scaled, rounding):
            cause = message("clipped_while_scaled", scale=first.scale)
        return differs("clipping", "factor", cause, step=step, rank=rank, tensor=name, expected=wanted, found=ratio)
    return None


# Ranks that share out a model: one norm of all gives them one factor


def clipped_together(
    stages: Sequence[Ranks], record: Record, norms: Mapping[int, float] | None = None
) -> Finding | None:
    """Answers 'clipping' of stages that torch's functions clip by a norm, which is to be that of all stages. None where
    no step is clipped so on each stage.

    norms: step -> the norm of all stages, as one process has it: each parameter shows it, however many calls clip a
    stage; None: what the stages have recorded says it.
    """
    limits, reached, close = list[float](), 0, CLIPPED_APART * coarser_of(stages[0])
    ranks = [*{rank.rank: rank for stage in stages for rank in stage}.values()]
    for step in common_steps(ranks):
        limit = _limit(ranks, step)
        if limit is None or (norms is not None and step not in norms):
            continue
        wanted = None if norms is None else clipping_factor(limit, norms[step])
        known = _factors(ranks, record, step, wanted)
        if known is None:
            continue
        limits.append(limit)
        reached += min(known.values()) < 1 - CLIPPED_APART_BY_SUMS
        first, *_ = known.values()
        apart = _first_apart(known, close)
        if apart is not None:
            cause = message("clipped_by_stage_norms", factors=[round(factor, 4) for factor in known.values()])
            return _another_factor(cause, step, apart, first, known[apart])
        if norms is None:
            wanted = _factor_of_all(stages, record, step, limit)
        if wanted is not None and _are_apart(first, wanted, CLIPPED_APART_BY_SUMS):
            return _another_factor(message("clipped_by_another_norm"), step, next(iter(known)), wanted, first)
    if not limits:
        return None
    if not reached:
        return Finding("clipping", "unknown", message("no_step_reached_the_limit", limit=limits[0]))
    return Finding("clipping", "right", message("clipped_by_the_whole_norm", steps=reached))


def clipped_apart(layout: ByHand, axis: str, ranks: Ranks, record: Record) -> Finding | None:
    """Finds ranks of a replica whose gradients torch's clipping multiplies by other factors. axis: along which they
    share out the model."""
    close = CLIPPED_APART * coarser_of(ranks)
    for step in common_steps(ranks):
        for replica in layout.replicas:
            factors = _factors([ranks[rank] for rank in replica], record, step)
            rank = None if factors is None else _first_apart(factors, close)
            if factors is None or rank is None:
                continue
            first, *_ = factors.values()
            rounded = [round(factor, 4) for factor in factors.values()]
            cause = message("clipped_by_local_norms", axis=axis, factors=rounded)
            quantity, found = f"factor along {axis}", factors[rank]
            return differs("clipping", quantity, cause, step=step, rank=rank, expected=first, found=found)
    return None


def _limit(ranks: Ranks, step: int) -> float | None:
    """Returns the limit of the norm to which a step is clipped; None where nothing is, or by values, or a rank's calls
    have several limits."""
    limits = [{clip.limit for clip in rank.steps[step].clips} for rank in ranks if rank.steps[step].clips]
    if not limits or any(len(of_rank) > 1 or None in of_rank for of_rank in limits):
        return None
    return limits[0].pop()


def _factors(ranks: Ranks, record: Record, step: int, wanted: float | None = None) -> dict[int, float] | None:
    """Returns rank -> by what clipping has multiplied its gradients: 1 where it clips nothing beside others that do. A
    rank without gradients has none.

    wanted: the factor that each parameter should have: that of the parameter which is furthest from it counts, and a
    rank may clip by several calls. None: the factor is not known. Returns None where torch's function has not clipped
    all gradients of a rank that clips, by a norm, and, without `wanted`, in one call.
    """
    factors = dict[int, float]()
    for rank in ranks:
        arrays, clips = record.arrays(STEP.format(step), rank.rank), rank.steps[step].clips
        taken, before = of_kind(arrays, TAKEN), of_kind(arrays, UNCLIPPED)
        if not any(norm(before.get(name, array)) for name, array in taken.items()):
            continue
        if not clips:
            factors[rank.rank] = 1.0
            continue
        in_calls = sum(clip.parameters for clip in clips) >= max(clip.with_gradient for clip in clips)
        is_whole = _clips_whole_norm(rank.steps[step]) or (wanted is not None and in_calls)
        ratios = [norm(taken[name]) / norm(before[name]) for name in before if name in taken and norm(before[name])]
        if not is_whole or not ratios:
            return None
        if wanted is None:
            largest = max(before, key=lambda parameter: norm(before[parameter]))
            factors[rank.rank] = norm(taken[largest]) / norm(before[largest])
        else:
            factors[rank.rank] = max(ratios, key=lambda ratio: abs(ratio / wanted - 1))
    return factors if factors and any(rank.steps[step].clips for rank in ranks) else None


def _first_apart(factors: Mapping[int, float], close: float) -> int | None:
    """Returns the first rank with another factor than the first one's; None where all are one."""
    first, *_ = factors.values()
    return next((rank for rank, factor in factors.items() if _are_apart(factor, first, close)), None)


def _another_factor(cause: Message, step: int, rank: int, expected: float, found: float) -> Finding:
    quantity = "factor along stage"
    return differs("clipping", quantity, cause, step=step, rank=rank, expected=expected, found=found)


def _clips_whole_norm(step: StepRecord) -> bool:
    """Returns whether torch's function has clipped all of a rank's gradients once, by a norm."""
    by_norm = [clip for clip in step.clips if clip.limit is not None and clip.parameters >= clip.with_gradient]
    return len(step.clips) == len(by_norm) == 1


def _are_apart(factor: float, wanted: float, close: float) -> bool:
    """Returns whether two factors are those of clippings by other norms."""
    return abs(factor - wanted) > close * abs(wanted)


def _factor_of_all(stages: Sequence[Ranks], record: Record, step: int, limit: float) -> float | None:
    """Returns the factor by which the norm of all stages clips; None where sums of large tensors do not say it, and
    where stages have copies of a tied parameter, which counts once or on each."""
    arrays = [of_kind(record.arrays(STEP.format(step), stage[0].rank), UNCLIPPED) for stage in stages]
    if any(array.size >= BUCKETS for of_stage in arrays for array in of_stage.values()):
        return None
    gradients = [{array.tobytes() for array in of_stage.values() if array.any()} for of_stage in arrays]
    if len(set().union(*gradients)) < sum(map(len, gradients)):
        return None
    return clipping_factor(limit, math.hypot(*(norm_of_all(of_stage, [*of_stage]) for of_stage in arrays)))
