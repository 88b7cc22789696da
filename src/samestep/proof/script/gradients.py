"""Whether each step's gradient is the mean of what the ranks computed, and how it was clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from samestep.proof.script.losses import (
    Scaling,
    accumulated_targets,
    alike,
    loss_weights,
    several_losses,
    targets,
    total_weight,
)
from samestep.proof.script.step_gradients import CLOSE, Array, StepGradients, norm, of_ranks, whole
from samestep.proof.script.updates import SHARDED, Ranks, common_steps, differs, many
from samestep.records.record import Record
from samestep.records.script import BUCKETS, TAKEN, UNCLIPPED, ClipSeen, Finding

PASSED = "the same on all ranks: the mean of what they computed"
LOST = "the gradients of {} of {} micro-batches were removed before the step (zero_grad inside the accumulation)"
ALL_LOST = "the gradients are removed before the step: zero_grad stands between backward and the optimizer's step"
UNEQUAL = (
    "the ranks accumulate different numbers of micro-batches in this step ({}), and their losses are not divided so "
    "that they weigh one together"
)
LEFT_OUT = (
    "{} of {} left out of the reduction: each rank keeps its own gradient of it (used outside of the wrapped forward, "
    "or added after the model was wrapped)"
)
CLIPPED_APART = (
    "clipped before the reduction: each rank clips its own gradient by its own norm, and the mean of these is another "
    "gradient"
)
CLIPPED_EARLY = (
    "clipped after micro-batch {} of {}, before the gradient is whole: clipping belongs after the last micro-batch"
)
NOT_CLEARED = "the gradients of the step before are never cleared: this step's are added to them (zero_grad is missing)"
NEVER = (
    "the gradients are never reduced: each rank steps with its own (forward through .module, no_sync that is never "
    "left, or no wrapper at all)"
)
NEVER_BUT_DIVIDED = (
    "the gradients are divided by the {} ranks, and never reduced: each rank steps with a part of its own (an "
    "all-reduce over a group of one rank, or one that is left out)"
)
TOO_EARLY = (
    "reduced before the last micro-batch: only up to number {} of 0 to {}, after which each rank adds its own (no_sync "
    "is left too early, or the flag is set after the forward)"
)
LATE = (
    "the gradients of the micro-batches after number {} of 0 to {} are in no step: they are reduced before the last "
    "one (the flag that lets the last one be reduced is set too early)"
)
OTHER_NORM = "clipped by another norm than that of the whole gradient: of one rank's shard, or counted per rank"
STILL_SCALED = (
    "clipped while the gradients are multiplied by the scaler's factor of {:g}: scaler.unscale_(optimizer) belongs "
    "before the clipping"
)
MICRO_MEANS = (
    "a mean of means: a target in micro-batch {} weighs {:.3g} times one in micro-batch 0, because the micro-batches "
    "have different numbers of targets; divide the sums of losses by the number in all of the step's micro-batches"
)
NOT_FINITE = (
    "the gradient of {} on rank {} holds NaN or an infinity at step {}: from there on nothing can be compared (memory "
    "that was never initialised, a rate that is too high)"
)
OTHER = "no known mistake explains it: {} of {} parameters have neither the mean nor the rank's own gradient"

HOOKED = (
    "a communication hook (PowerSGD, quantization) compresses the gradients at step {}: they are no mean of the ranks'"
)


def gradient(ranks: Ranks, record: Record) -> list[Finding]:
    """Answers 'gradient' (its reduction) and 'loss weight' (its scale), at each step until one differs."""
    if any(step.sharded for rank in ranks for step in rank.steps):
        return [Finding("gradient", "unknown", SHARDED)]
    several = len({step.optimizer for step in ranks[0].steps}) > 1
    first = ranks[0].steps[0]
    if not several and all(step.cleared for step in ranks[0].steps):  # a step that is skipped clears now and then
        cause = LOST.format(first.cleared, first.cleared + len(first.micro)) if first.micro else ALL_LOST
        where = {"expected": f"{first.cleared + len(first.micro)} micro-batches", "found": len(first.micro)}
        return [differs("gradient", "gradient", cause, step=0, rank=0, **where)]
    worst, scales, taken = 0.0, list[Finding](), dict[int, dict[str, Array]]()
    for step in common_steps(ranks):
        of, number = StepGradients.read(record, ranks, step), ranks[0].steps[step].optimizer
        before, taken[number] = taken.get(number, {}), of.taken[0]
        if not of.names:
            continue
        if broken := of.not_finite():
            return [Finding("gradient", "unknown", NOT_FINITE.format(broken[1], broken[0], step)), *scales[:1]]
        finding = _reduction(of, ranks, step, before)
        if finding and several and not of.are_own() and finding.sentence != NOT_CLEARED:
            why = f"several optimizers share the gradients of a backward(): {finding.sentence}"
            finding = Finding("gradient", "unknown", why)
        if finding and finding.sentence.startswith(OTHER.partition(":")[0]) and of.is_compressed:
            finding = Finding("gradient", "unknown", HOOKED.format(step))
        if finding:
            return [finding, *scales[:1]]
        worst = max(worst, of.worst)
        scales.append(_scale(of, ranks, step) if not several else _several())
        if scales[-1].answer == "differs":
            break
    if not scales:
        return [Finding("gradient", "unknown", "no gradient was seen on its way to the optimizer, or all are zero")]
    right = Finding("gradient", "right", f"{PASSED}, to {worst:.0e} over {many(len(scales), 'step')}")
    wrong = [each for each in scales if each.answer != "right"]
    return [right, wrong[-1] if wrong else scales[-1]]


def _several() -> Finding:
    return Finding("loss weight", "unknown", "several optimizers: each loss may be summed on purpose")


def _reduction(of: StepGradients, ranks: Ranks, step: int, before: Mapping[str, Array]) -> Finding | None:
    """Returns what is wrong with the reduction of a step's gradients; None where they are the scaled sum.

    before: what the same optimizer of rank 0 took in its step before.
    """
    bad = of.bad()
    if not bad:
        return None
    rank, name = bad[0]
    if all(of.holds(*pair, before) for pair in bad):
        cause, instead = NOT_CLEARED, "that, and the gradient of the step before"
    else:
        cause, instead = _cause(of, bad, ranks[rank].steps[step].clips)
    shown = {"expected": f"the mean of {of.size} ranks", "found": instead, "rank": rank, "tensor": name}
    return differs("gradient", "gradient", cause, step=step, **shown)


def _cause(of: StepGradients, bad: Sequence[tuple[int, str]], clips: Sequence[ClipSeen]) -> tuple[str, str]:
    """Returns the usual cause of gradients that are not the mean over ranks, and what they are instead."""
    names = {name for _, name in bad}
    own = of.are_own()
    if own and 2 * len(names) <= len(of.names):
        return LEFT_OUT.format(many(len(names), "parameter"), len(of.names)), "the rank's own"
    if own and _clipped_apart(of):
        return CLIPPED_APART, "the rank's own, when it was clipped"
    early = {clip.after for clip in clips if clip.after < of.micro}
    if early:
        return CLIPPED_EARLY.format(min(early) - 1, of.micro), "clipped on the way"
    if own:
        return NEVER, "the rank's own"
    if all(of.is_own(*pair, of.size) for pair in bad):
        return NEVER_BUT_DIVIDED.format(of.size), f"the rank's own, divided by {of.size}"
    for last in range(of.micro - 1):
        if all(of.is_partial(*pair, last) for pair in bad):
            return TOO_EARLY.format(last, of.micro - 1), f"reduced up to micro-batch {last}, then the rank's own"
    for last in range(of.micro - 1):
        if all(of.is_up_to(*pair, last) for pair in bad):
            return LATE.format(last, of.micro - 1), f"that of the micro-batches up to {last}"
    for first in range(1, of.micro):
        if all(of.is_rest(*pair, first) for pair in bad):
            return LOST.format(first, of.micro), f"that of micro-batch {first} and later"
    return OTHER.format(len(names), len(of.names)), f"off by {of.distance(*bad[0]):.1e}, relative"


def _clipped_apart(of: StepGradients) -> bool:
    """Whether gradients that were unreduced when they were clipped are the same on all ranks at the step."""
    taken = [each[of.names[0]] for each in of.taken]
    return of.clipped and all(norm(each - taken[0]) <= CLOSE * norm(taken[0]) for each in taken)


def _scale(of: StepGradients, ranks: Ranks, step: int) -> Finding:
    """Whether each rank's losses enter the gradient so that their weights add up to one."""
    question = "loss weight"
    micros = [rank.steps[step].micro for rank in ranks]
    uneven = targets(micros)
    if uneven:
        rank, ratio = uneven
        cause = (
            f"a mean of means: a target on rank {rank} weighs {ratio:.3g} times one on rank 0, because the ranks have "
            "different numbers of targets; divide the sum of losses by the number on all ranks"
        )
        return differs(question, "weight of a target", cause, step=step, rank=rank, expected=1.0, found=ratio)
    for rank, of_rank in enumerate(micros):
        if micro_and_ratio := accumulated_targets(of_rank):
            cause = MICRO_MEANS.format(*micro_and_ratio)
            shown = {"rank": rank, "expected": 1.0, "found": micro_and_ratio[1]}
            return differs(question, "weight of a target", cause, step=step, **shown)
    scale = ranks[0].steps[step].scale or 1.0
    scaling = Scaling(of.factor * scale, of.size, of.micro, max(len(s.micro) for s in ranks[0].steps))
    weights = [[loss_weights(micro.losses) for micro in each] for each in micros]
    if any(weight is None for each in weights for weight in each):
        return _without_weights(scaling)
    sums = any(term.reduction == "sum" for each in micros for micro in each for term in micro.losses)
    total = total_weight(weights, of.factor, scaling.near_one)
    if scaling.near_one(total):
        return Finding(
            question, "right", f"the losses of all ranks and micro-batches enter with a total weight of {total:.6g}"
        )
    own = sum(weight.largest for each in weights for weight in each if weight) / of.size / scale
    composite = any(len(micro.losses) > 1 for each in micros for micro in each)
    counts = [len(each) for each in micros]
    if scaling.is_mean and len({*counts}) > 1 and alike(weights) and not (sums or composite):
        cause = UNEQUAL.format(", ".join(map(str, counts)))
        return differs(question, "total weight of the losses", cause, step=step, expected=1.0, found=round(total, 9))
    composite |= any(several_losses(each, [of.loader for of in rank.passes]) for each, rank in zip(micros, ranks))
    cause = scaling.cause(own)
    if cause and not (sums or composite):
        return differs(question, "total weight of the losses", cause, step=step, expected=1.0, found=round(total, 9))
    if cause and not scaling.is_mean and not sums:
        return differs(question, "total weight of the losses", cause, step=step, expected=1.0, found=round(total, 9))
    why = f"the losses enter with a total weight of {total:.4g}, which is no factor of ranks or micro-batches"
    return Finding(
        question, "unknown", why + ("; sums and several terms may be weighted on purpose" * (sums or composite))
    )


def _without_weights(scaling: Scaling) -> Finding:
    question = "loss weight"
    if scaling.is_mean and scaling.micro == 1:
        return Finding(question, "right", "the gradient is the mean over ranks of one micro-batch each")
    if scaling.is_mean:
        why = "whether the accumulated losses are divided by their number cannot be seen"
    else:
        why = f"the gradient is {scaling.reduced:.4g} times the mean over ranks, as where a loss is divided beforehand"
    return Finding(question, "unknown", f"{why}: the loss is not a mean or sum that the recorder knows")


def clipping(ranks: Ranks, record: Record) -> Finding:
    """Whether the reduced gradient is clipped once a step, and by the norm of all parameters."""
    question, clipped = "clipping", 0
    for step in common_steps(ranks):
        clips = [rank.steps[step].clips for rank in ranks]
        if not any(clips):
            continue
        clipped += 1
        micro = len(ranks[0].steps[step].micro)
        early = [each for each in clips[0] if each.after < micro]
        if early:
            cause = f"clipped after each micro-batch, {len(clips[0])} times a step: clipping belongs after the last one"
            return differs(question, "clipping", cause, step=step, expected=1, found=len(clips[0]), rank=0)
        if finding := _norms(step, clips[0], record, ranks):
            return finding
    if not clipped:
        return Finding(question, "right", "nothing is clipped by torch.nn.utils")
    return Finding(question, "right", f"once a step, after the reduction, in {many(clipped, 'step')}")


def _norms(step: int, clips: Sequence[ClipSeen], record: Record, ranks: Ranks) -> Finding | None:
    last = [clip for clip in clips if clip.limit is not None]
    if len(last) > 1 and all(clip.parameters < clip.of for clip in last):
        cause = f"clipped in {len(last)} parts, each by its own norm and not by the norm of all parameters"
        return differs(
            "clipping", "clipping", cause, step=step, rank=0, expected="one norm", found=f"{len(last)} norms"
        )
    if len(last) != 1 or last[0].parameters < last[0].of:
        return None
    limit = last[0].limit
    assert limit is not None
    arrays, shards = of_ranks(record, ranks, step), ranks[0].steps[step].shards
    for rank, (before, taken) in enumerate(zip(whole(arrays, UNCLIPPED, shards), whole(arrays, TAKEN, shards))):
        if not before or any(each.size >= BUCKETS for each in before.values()):
            return None  # sums of a large tensor do not say its norm
        total = float(np.sqrt(sum(norm(each) ** 2 for each in before.values())))
        wanted = min(1.0, limit / (total + 1e-6))
        name, most = max(((name, norm(each)) for name, each in before.items()), key=lambda pair: pair[1])
        ratio = norm(taken[name]) / most if most else wanted
        if abs(ratio / wanted - 1) > 1e-2:
            scale = ranks[0].steps[step].scale
            still_scaled = scale and abs(ratio * scale / wanted - 1) <= 1e-2
            cause = STILL_SCALED.format(scale) if still_scaled else OTHER_NORM
            return differs("clipping", "factor", cause, step=step, rank=rank, tensor=name, expected=wanted, found=ratio)
    return None
