"""Judges whether two recordings took the same gradients; where not, from which part of the step: its micro-batches or
its loss."""

from __future__ import annotations

import math

from samestep.bounds import (
    FIRST_LOSS_APART,
    FIRST_STEP_APART,
    LATER_STEPS_APART,
    LOSS_APART_OF_PIECES,
    LOSS_LEAST_OF_PAIR,
    OF_ITS_OWN_NORM,
    PART_OF_WHOLE,
    ROUNDING_GROWN,
    ROUNDING_GROWS,
)
from samestep.judge.findings import Ranks, differs
from samestep.judge.fit import norm
from samestep.judge.gradient_comparison import GradientComparison, Holder
from samestep.judge.record_pair import RecordPair
from samestep.judge.step_gradients import coarser_of
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.script import StepRecord

# Where the gradient differs at the same weights: even a loss that hardly differs tells why.


def bound_of(pair: RecordPair, number: int) -> float:
    """Returns how far the gradients of a step may be apart. After steps that are the same to the last bit this step's
    are as close as a first one's; later ones as far as the rounding before them may have grown."""
    coarser = coarser_of(pair.first)
    if pair.begins_alike(number) or not number:
        return FIRST_STEP_APART * coarser
    if pair.since:
        return LATER_STEPS_APART * coarser
    before = max((distance for distance in pair.distances[:number] if distance), default=0.0)
    return min(LATER_STEPS_APART, max(ROUNDING_GROWN, ROUNDING_GROWS * before)) * coarser


def gradients(pair: RecordPair) -> list[Finding]:
    """Compares what the optimizer took at each step; where that differs, the micro-batches and the losses, too."""
    step, gradient = _gradient(pair)
    if pair.since:
        return [gradient]
    if gradient.answer == "right" and (hidden := _before_clipping(pair)):
        step, gradient = hidden
    return [*_loss(pair, step, differ=gradient.answer == "differs"), gradient]


def _gradient(pair: RecordPair) -> tuple[int, Finding]:
    """Returns the number of the step that differs, or of all that were compared, and the answer."""
    distances = list[float]()
    for number in range(pair.steps):
        step, compared = pair.since + number, pair.compared(number, bound_of(pair, number))
        if compared is None:
            continue
        if compared.not_finite(step):
            return number, Finding("gradient", "unknown", message("compared_gradient_not_finite", step=step))
        distances.append(compared.worst)
        holder = compared.furthest if compared.apart else _apart_by_itself(pair, compared, number)
        if holder is None:
            continue
        if _only_clipped(pair, number):
            cause = message("same_gradient_clipped_otherwise")
            return number, compared.difference("clipping", "gradient", cause, step=step, holder=holder, rank=None)
        cause = _cause(pair, number)
        return number, compared.difference("gradient", "gradient", cause, step=step, holder=holder, rank=None)
    if not distances:
        return 0, Finding("gradient", "unknown", message("no_step_has_all_gradients"))
    if not any(distances):
        return pair.steps, Finding("gradient", "right", message("gradients_bitwise_the_same"))
    said = message("gradients_are_close", first=distances[0], worst=max(distances))
    return pair.steps, Finding("gradient", "right", said)


def _apart_by_itself(pair: RecordPair, compared: GradientComparison, number: int) -> Holder | None:
    """Returns a parameter whose gradient is another one beside its own norm, where a step begins with the same bits and
    this gradient is no rounding of all of them."""
    coarser = coarser_of(pair.first)
    for holder, distance in compared.distances.items() if pair.begins_alike(number) else ():
        size, own_norm = compared.sizes[holder], norm(compared.pair(*holder)[0])
        is_apart = distance * size > OF_ITS_OWN_NORM * coarser * own_norm
        if is_apart and own_norm > PART_OF_WHOLE * coarser * size:
            return holder
    return None


def _only_clipped(pair: RecordPair, number: int) -> bool:
    """Returns whether the gradients of a step were the same before they were clipped."""
    compared = pair.compared(number, before_clipping=True)
    if pair.since or compared is None or not any(step.clips for step in pair.steps_of_rank_0(number)):
        return False
    return compared.distance_of_all <= bound_of(pair, number)


def _before_clipping(pair: RecordPair) -> tuple[int, Finding] | None:
    """Finds gradients that clipping alone makes the same: a loss that is twice as large, where each of these steps
    reaches the limit. Later steps may not."""
    for number in range(pair.steps):
        compared = pair.compared(number, before_clipping=True)
        # A script that clips by its own code has no gradients before it.
        if compared is None or not all(pair.clipped(number)) or compared.distance_of_all <= bound_of(pair, number):
            continue
        cause, what = message("clipping_hides_another_gradient"), "gradient before clipping"
        holder = compared.furthest
        return number, compared.difference("gradient", what, cause, step=number, holder=holder, rank=None)
    return None


def _cause(pair: RecordPair, number: int) -> Message:
    first, second = pair.steps_of_rank_0(number)
    if pair.since:
        if number:
            return message("other_gradient_after_close_weights")
        return message("random_state_not_restored")
    if bool(first.uncleared) != bool(second.uncleared):
        return message("gradients_cleared_in_one")
    draws = [_draws(ranks, number) for ranks in (pair.first, pair.second)]
    if None not in draws and draws[0] != draws[1]:
        return message("forward_draws_otherwise")
    if not pair.begins_alike(number):
        return message("other_gradient_after_close_weights")
    if pair.normalises_by_rank:
        return message("rows_normalised_by_rank")
    return message("same_steps_other_gradient") if number else message("same_weights_other_gradient")


def _draws(ranks: Ranks, number: int) -> str | None:
    draws = ranks[0].randoms.draws
    return draws[number] if number < len(draws) else None


def _loss(pair: RecordPair, number: int, differ: bool) -> list[Finding]:
    """Compares the micro-batches and the losses up to a step. They tell why its gradient differs; where no gradient
    does, a script may have other numbers that give the same one. differ: whether it does."""
    said: list[Finding] = []
    last = min(number + 1, pair.steps) if differ else pair.steps
    counts = [tuple(len(step.micro_batches) for step in pair.steps_of_rank_0(index)) for index in range(last)]
    apart = next((index for index, (first, second) in enumerate(counts) if first != second), None)
    # On fewer ranks a script may accumulate more: the rows say whether it has.
    if apart is not None and differ and not pair.on_other_ranks:
        first, second = counts[apart]
        cause = message("steps_of_other_micro_batches")
        what = "micro-batches of a step"
        said.append(differs("micro-batches", what, cause, step=apart, expected=first, found=second))
    elif apart is not None:
        said.append(Finding("micro-batches", "right", message("other_micro_batches_same_gradient")))
    losses = [(loss_of(pair.first, index), loss_of(pair.second, index)) for index in range(last)]
    if any(None in pair_of_losses for pair_of_losses in losses):
        return [*said, Finding("loss", "unknown", message("loss_values_not_recorded"))]
    steps = [
        index
        for index, (first, second) in enumerate(losses)
        if first is not None
        and second is not None
        and not math.isclose(first, second, rel_tol=_loss_bound(pair, index, differ), abs_tol=LOSS_LEAST_OF_PAIR)
    ]
    if not steps:
        return [*said, Finding("loss", "right", message("losses_are_the_same", steps=last))]
    if not differ:
        return [*said, Finding("loss", "right", message("other_losses_same_gradient"))]
    first_loss, second_loss = losses[steps[0]]
    cause = message("same_rows_other_loss") if pair.begins_alike(steps[0]) else message("later_loss_differs")
    if pair.normalises_by_rank and not steps[0]:
        cause = message("rows_normalised_by_rank")
    return [*said, differs("loss", "loss", cause, step=steps[0], expected=first_loss, found=second_loss)]


def _loss_bound(pair: RecordPair, number: int, differ: bool) -> float:
    """Returns how far the losses of a step may be apart, relative. differ: whether a gradient differs."""
    return (FIRST_LOSS_APART if differ and pair.begins_alike(number) else LOSS_APART_OF_PIECES) * coarser_of(pair.first)


def loss_of(ranks: Ranks, number: int) -> float | None:
    """Returns the mean over ranks of the sum of each one's losses of a step; None where one is not known."""
    steps = [rank.steps[number] for rank in ranks]
    values = [value for step in steps for value in _values(step)]
    if not values or None in values:
        return None
    return math.fsum(value for value in values if value is not None) / len(ranks)


def _values(step: StepRecord) -> list[float | None]:
    """Returns the losses of a step's micro-batches, without a gradient scaler's factor."""
    scale = step.scale or 1.0
    return [None if batch.value is None else batch.value / scale for batch in step.micro_batches]
