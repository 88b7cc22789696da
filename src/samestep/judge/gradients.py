"""Judges whether each step's gradient is the mean of the ranks' own gradients, and how it was clipped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from samestep.bounds import REDUCED_APART, TOLD_APART
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.judge.fit import Array, norm
from samestep.judge.gradient_weights import OF_WEIGHTS, GradientWeights
from samestep.judge.loss_weight import largest, loss_weight
from samestep.judge.step_gradients import StepGradients
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import ScriptRecord, StepRecord

OF_ONE_RANK = ("broadcast", "scatter", "barrier")  # collectives that send one rank's tensor, or nothing
FEW = 4  # elements a step: of losses and counts that a script prints
UNKNOWN_FACTOR = "losses_have_an_unknown_factor"
NOT_CLEARED = "gradients_never_cleared"
NO_KNOWN_MISTAKE = "gradient_of_no_known_mistake"
# Findings that a layout of the ranks, or a communication hook, may explain more closely.
UNEXPLAINED = {NO_KNOWN_MISTAKE, *OF_WEIGHTS}


def gradient(ranks: Ranks, record: Record) -> list[Finding]:
    """Answers 'gradient' (its reduction) and 'loss weight' (its scale), at each step until one differs."""
    if any(step.sharded for rank in ranks for step in rank.steps):
        return [Finding("gradient", "unknown", message("sharding_not_judged"))]
    several = len({step.optimizer for step in ranks[0].steps}) > 1
    # A skipped step may clear the gradients, too.
    if not several and all(step.cleared for step in ranks[0].steps):
        return [_cleared(ranks)]
    worst, scales, taken = 0.0, list[Finding](), dict[int, dict[str, Array]]()
    by_optimizer = clipped = by_numbers = 0
    for step in common_steps(ranks):
        gradients, optimizer = StepGradients.read(record, ranks, step), ranks[0].steps[step].optimizer
        before, taken[optimizer] = taken.get(optimizer, {}), gradients.taken[0]
        if finding := uncleared(ranks, step):
            return [finding, *scales[:1]]
        if not gradients.names:
            continue
        if broken := gradients.not_finite():
            if finding := _not_finite_on_some(gradients, ranks, step):
                return [finding, *scales[:1]]
            said = message("gradient_of_rank_not_finite", parameter=broken[1], rank=broken[0], step=step)
            return [Finding("gradient", "unknown", said), *scales[:1]]
        if reduced_by_optimizer(gradients, ranks, step):
            by_optimizer += 1
            unseen = Finding("loss weight", "unknown", message("optimizer_reduces_gradients_itself"))
            scale = loss_weight(gradients.as_mean(), ranks, step)
            scales.append(scale if scale.answer == "differs" else unseen)
            continue
        held = all(gradients.holds(*pair, before) for pair in gradients.not_mean)
        if gradients.not_mean and not held and gradients.is_mean_clipped_alike():
            clipped += 1
            scales.append(Finding("loss weight", "unknown", message("clipped_by_own_code")))
            continue
        weights = GradientWeights.read(gradients) if gradients.not_mean and not held else None
        if weights and weights.are_mean_over_all(ranks, step):
            by_numbers += 1
            scales.append(Finding("loss weight", "unknown", message("gradients_weighed_by_numbers")))
            continue
        finding = _reduction(gradients, ranks, step, before, weights)
        if finding and several and not gradients.are_own() and finding.message.id != NOT_CLEARED:
            shared = message("optimizers_share_a_backward", cause=finding.message)
            finding = Finding("gradient", "unknown", shared)
        if finding and finding.message.id in UNEXPLAINED and gradients.is_compressed:
            finding = Finding("gradient", "unknown", message("gradients_compressed_by_hook", step=step))
        if finding:
            return [finding, *scales[:1]]
        worst = max(worst, gradients.worst)
        if several:
            scales.append(Finding("loss weight", "unknown", message("several_optimizers_may_sum_losses")))
        else:
            scales.append(loss_weight(gradients, ranks, step))
    if not scales and not several and _all_removed(ranks[0]):
        return [_cleared(ranks)]
    if not scales:
        return [Finding("gradient", "unknown", message("no_gradient_seen"))]
    said = message("gradients_are_the_mean", distance=worst, steps=len(scales))
    if clipped:
        said = message("gradients_are_the_mean_clipped_by_own_code", steps=len(scales), clipped=clipped)
    if by_numbers:
        said = message("gradients_are_the_mean_by_numbers", steps=len(scales), weighed=by_numbers)
    if by_optimizer:
        said = message("gradients_are_reduced_by_the_optimizer", steps=by_optimizer)
    right = Finding("gradient", "right", said)
    wrong = [scale for scale in scales if scale.answer == "differs"]
    if wrong:
        # The gravest mistake is told; of the steps that have it the first one.
        gravest = largest(wrong).message.id
        return [right, next(scale for scale in wrong if scale.message.id == gravest)]
    if _scaled_by_step(scales):
        return [right, Finding("loss weight", "unknown", message("scaled_by_own_code"))]
    return [right, next((scale for scale in reversed(scales) if scale.answer != "right"), scales[-1])]


def changed_alike(finding: Finding, ranks: Ranks, record: Record) -> Finding:
    """Returns a finding about gradients; where no known mistake explains them, and all ranks have the same, unknown:
    what the script's own code makes of the mean is right where one process makes the same of it."""
    if finding.message.id != NO_KNOWN_MISTAKE or finding.divergence is None or finding.divergence.step is None:
        return finding
    step = finding.divergence.step
    if not StepGradients.read(record, ranks, step).are_alike():
        return finding
    return Finding(finding.question, "unknown", message("gradients_changed_alike", step=step))


def _scaled_by_step(scales: Sequence[Finding]) -> bool:
    """Returns whether the losses seem to enter with another weight in each step, as where the script clips by its own
    code."""
    weights = [scale.message.fields["weight"] for scale in scales if scale.message.id == UNKNOWN_FACTOR]
    return len(weights) > 1 and max(weights) - min(weights) > TOLD_APART * max(map(abs, weights))


def reduced_by_optimizer(gradients: StepGradients, ranks: Ranks, step: int) -> bool:
    """Returns whether each rank's gradient is its own until the optimizer's step, which moves all ranks' weights
    alike."""
    names = {name for _, name in gradients.not_mean}
    steps = [rank.steps[step] for rank in ranks]
    if not names or not gradients.are_own() or not _may_hand_on(ranks):
        return False
    if not all(names <= {*of_rank.moved} for of_rank in steps) and not _written(names, ranks, step):
        return False
    # The gradients were reduced between their clipping and the step.
    if _clipped_apart(gradients):
        return False
    weights = [{name: of_rank.weights.get(name) for name in names} for of_rank in steps]
    return all(of_rank == weights[0] and None not in of_rank.values() for of_rank in weights)


def _may_hand_on(ranks: Ranks) -> bool:
    """Returns whether the ranks may have told each other gradients in each step: by operations between two ranks, or by
    collectives of more than a few elements that are no broadcasts. Where these are not all known, they may."""
    groups = ranks[0].groups.values()
    if not groups or any(group.first > 1 for group in groups) or any(rank.talks for rank in ranks):
        return True
    calls = [call for group in groups for call in group.calls if not call.startswith(OF_ONE_RANK)]
    shapes = [re.findall(r"\d+", shape) for call in calls for shape in re.findall(r"\[(.*?)\]", call)]
    # Compressed gradients, the greatest elements or factors of a low rank, are fewer elements than the gradients.
    elements = sum(math.prod(map(int, shape)) for shape in shapes)
    return elements > FEW * len(common_steps(ranks))


def _written(names: set[str], ranks: Ranks, step: int) -> bool:
    """Returns whether the script writes other weights of these names between this step and the one beside it, as it
    does where its optimizer holds copies of them or pieces of these."""
    beside = step + 1 if step + 1 < len(ranks[0].steps) else step - 1
    if beside < 0:
        return False
    pairs = [(of_rank.steps[step].weights, of_rank.steps[beside].weights) for of_rank in ranks]
    return all(weights.get(name) != weights_beside.get(name) for weights, weights_beside in pairs for name in names)


def _not_finite_on_some(gradients: StepGradients, ranks: Ranks, step: int) -> Finding | None:
    """Finds ranks whose own gradient is NaN or infinite where that of others is not, and the step is taken with it.

    Under a gradient scaler that is how its factor is found, and such a step is skipped.
    """
    broken = gradients.ranks_not_finite()
    if not broken or len(broken) == gradients.size or ranks[0].steps[step].scale is not None:
        return None
    cause = message("gradient_not_finite_on_some_ranks", ranks=broken, step=step)
    finite = message("gradient_that_is_finite")
    return differs("gradient", "gradient", cause, step=step, rank=broken[0], expected=finite, found="NaN")


def _cleared(ranks: Ranks) -> Finding:
    """Returns the finding about gradients of which some are removed before each step."""
    first = ranks[0].steps[0]
    # A forward pass whose backward comes after the step has no loss yet.
    micro_batches = first.micro_batches if first.cleared else []
    left, computed = len(micro_batches), (first.cleared or 1) + len(micro_batches)
    cause = message("gradients_removed_before_the_step")
    if left:
        cause = message("gradients_removed_between_micro_batches", removed=first.cleared, micro_batches=computed)
    expected = message("gradient_of_micro_batches", micro_batches=computed)
    found = message("gradient_of_micro_batches", micro_batches=left)
    return differs("gradient", "gradient", cause, step=0, rank=0, expected=expected, found=found)


def uncleared(ranks: Ranks, step: int) -> Finding | None:
    """Finds parameters whose gradient was not cleared since their optimizer's step before: of several optimizers, of
    which one is forgotten, each has steps and gradients of its own."""
    for rank, record in enumerate(ranks):
        if names := record.steps[step].uncleared:
            return differs(
                "gradient",
                "gradient",
                message("gradients_never_cleared"),
                step=step,
                rank=rank,
                tensor=names[0],
                expected=message("mean_over_ranks", ranks=len(ranks)),
                found=message("gradient_with_that_of_the_step_before"),
            )
    return None


def _all_removed(rank: ScriptRecord) -> bool:
    """Returns whether each gradient is removed before the step that would take it, and no step moves a weight: of a
    step before the backward pass, whose gradient zero_grad() removes before the next one."""
    later = rank.steps[1:]
    return bool(later) and all(step.cleared for step in later) and not any(step.moved for step in rank.steps)


def _reduction(
    gradients: StepGradients,
    ranks: Ranks,
    step: int,
    before: Mapping[str, Array],
    weights: GradientWeights | None,
) -> Finding | None:
    """Returns the mistake in the reduction of a step's gradients; None where they are the scaled sum.

    before: the gradients that the same optimizer of rank 0 took in its step before. weights: of the gradients that are
    not the sum.
    """
    if not gradients.not_mean:
        return None
    rank, name = gradients.not_mean[0]
    if all(gradients.holds(*pair, before) for pair in gradients.not_mean):
        cause, found = message("gradients_never_cleared"), message("gradient_with_that_of_the_step_before")
    else:
        steps = [of_rank.steps[step] for of_rank in ranks]
        left_out = _left_out(gradients, ranks, step)
        cause, found = _cause(gradients, steps, rank, left_out=left_out, weights=weights)
    mean = message("mean_over_ranks", ranks=gradients.size)
    return differs("gradient", "gradient", cause, step=step, rank=rank, tensor=name, expected=mean, found=found)


def _cause(
    gradients: StepGradients,
    steps: Sequence[StepRecord],
    rank: int,
    *,
    left_out: set[str],
    weights: GradientWeights | None,
) -> tuple[Message, Message]:
    """Returns the usual cause of gradients that are not the mean over ranks, and what they are instead.

    steps: of each rank. rank: the first whose gradient is not the mean. left_out: parameters that an optimizer which
    reduces the others' gradients itself does not. weights: of the wrong gradients, where some give them.
    """
    wrong, count, size = gradients.not_mean, gradients.micro_batches, gradients.size
    names, all_names = {name for _, name in wrong}, gradients.names
    are_own, of_rank = gradients.are_own(), message("gradient_of_the_rank_alone")
    if unawaited := max(step.unawaited for step in steps):
        cause = message("asynchronous_reduction_not_awaited", reductions=unawaited)
        return cause, of_rank if are_own else message("gradient_off_by", distance=gradients.distance(*wrong[0]))
    if are_own and left_out:
        return message("parameters_left_out_of_reduction", left_out=len(left_out), parameters=len(all_names)), of_rank
    if are_own and 2 * len(names) <= len(all_names):
        return message("parameters_left_out_of_reduction", left_out=len(names), parameters=len(all_names)), of_rank
    if are_own and _clipped_apart(gradients):
        return message("clipped_before_reduction"), message("gradient_of_the_rank_when_clipped")
    if early := {clip.after for clip in steps[rank].clips if 0 < clip.after < count}:
        cause = message("clipped_before_last_micro_batch", micro_batch=min(early) - 1, micro_batches=count)
        return cause, message("gradient_clipped_on_the_way")
    if are_own:
        return message("ranks_never_reduce_gradients"), of_rank
    if all(gradients.is_own(*pair, size) for pair in wrong):
        cause = message("gradients_divided_and_never_reduced", ranks=size)
        return cause, message("gradient_of_the_rank_divided", ranks=size)
    for last in range(count - 1):
        if all(gradients.is_partial(*pair, last) for pair in wrong):
            cause = message("reduced_before_last_micro_batch", micro_batch=last, last=count - 1)
            return cause, message("gradient_reduced_up_to", micro_batch=last)
    for last in range(count - 1):
        if all(gradients.is_mean_of(*pair, slice(last + 1)) for pair in wrong):
            cause = message("last_micro_batches_in_no_step", micro_batch=last, last=count - 1)
            return cause, message("gradient_up_to_micro_batch", micro_batch=last)
    for first in range(1, count):
        if all(gradients.is_mean_of(*pair, slice(first, None)) for pair in wrong):
            cause = message("gradients_removed_between_micro_batches", removed=first, micro_batches=count)
            return cause, message("gradient_from_micro_batch_on", micro_batch=first)
    if gradients.are_own_clipped():
        return message("ranks_never_reduce_gradients"), of_rank
    if gradients.is_mean_of_clipped():
        return message("clipped_before_reduction"), message("gradient_of_the_rank_when_clipped")
    distance = message("gradient_off_by", distance=gradients.distance(*wrong[0]))
    if weights and (unequal := weights.cause()):
        return unequal, distance
    return message("gradient_of_no_known_mistake", wrong=len(names), parameters=len(all_names)), distance


def _left_out(gradients: StepGradients, ranks: Ranks, step: int) -> set[str]:
    """Returns the parameters with unreduced gradients whose weights become different on the ranks, while the weights
    of others with unreduced gradients stay the same: the optimizer reduces those itself.

    Returns none where the weights of all of them become different, or of none.
    """
    names, last = {name for _, name in gradients.not_mean}, common_steps(ranks)[-1]
    started = [rank.steps[step - 1].weights if step else rank.start for rank in ranks]
    moved = all(names <= {*rank.steps[step].moved} for rank in ranks)
    # Adam's first step takes the sign of a gradient alone, which may be the same on all ranks.
    if not moved or last - step < 2 or any(weights != started[0] for weights in started):
        return set()
    apart = {name for name in names if len({rank.steps[last].weights.get(name) for rank in ranks}) > 1}
    return apart if len(apart) < len(names) else set()


def _clipped_apart(gradients: StepGradients) -> bool:
    """Returns whether gradients that were unreduced when they were clipped are the same on all ranks at the step."""
    taken = [of_rank[gradients.names[0]] for of_rank in gradients.taken]
    return gradients.clipped and all(norm(array - taken[0]) <= REDUCED_APART * norm(taken[0]) for array in taken)
