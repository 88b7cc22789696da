"""Judges whether the losses of all ranks and micro-batches enter a step's gradient with weights that add up to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.bounds import TOLD_APART
from samestep.judge.findings import Ranks, differs
from samestep.judge.step_gradients import StepGradients
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.script import LossRecord, MicroBatchRecord

QUESTION: Question = "loss weight"


@dataclass(frozen=True)
class LossWeight:
    """The weight of one micro-batch's loss. largest: of its terms; together: of all of them."""

    largest: float
    together: float


Weights = Sequence[Sequence[LossWeight | None]]  # [rank][micro-batch]


def loss_weight(gradients: StepGradients, ranks: Ranks, step: int) -> Finding:
    """Judges whether each rank's losses enter the gradient so that their weights add up to one."""
    micro_batches = [rank.steps[step].micro_batches for rank in ranks]
    finding, uneven = _total_weight(gradients, ranks, step), _unequal_targets(micro_batches, step)
    return largest([finding, uneven]) if uneven else finding


def largest(findings: Sequence[Finding]) -> Finding:
    """Returns the finding whose weight is farthest from the expected one: a small difference hides no large one."""
    return max(findings, key=_distance)


def _distance(finding: Finding) -> float:
    found = finding.divergence.found if finding.divergence else None
    return abs(math.log(found)) if isinstance(found, float) and 0 < found < math.inf else float(found is not None)


def _total_weight(gradients: StepGradients, ranks: Ranks, step: int) -> Finding:
    micro_batches = [rank.steps[step].micro_batches for rank in ranks]
    scale = ranks[0].steps[step].scale or 1.0
    scaling = Scaling(
        factor=gradients.factor * scale,
        size=gradients.size,
        micro_batches=gradients.micro_batches,
        most=max(len(any_step.micro_batches) for any_step in ranks[0].steps),
    )
    weights = [[loss_weights(micro_batch.losses) for micro_batch in of_rank] for of_rank in micro_batches]
    if any(weight is None for of_rank in weights for weight in of_rank):
        return _without_weights(scaling)
    total = total_weight(weights, gradients.factor, scaling.near_one)
    if scaling.near_one(total):
        return Finding(QUESTION, "right", message("losses_weigh_one_together", weight=total))
    losses = [micro_batch.losses for of_rank in micro_batches for micro_batch in of_rank]
    sums = any(term.reduction == "sum" for terms in losses for term in terms)
    composite = any(len(terms) > 1 for terms in losses)
    counts = [len(of_rank) for of_rank in micro_batches]
    cause, nothing = None, [rank for rank, of_rank in enumerate(weights) if _weigh_nothing(of_rank)]
    if scaling.is_mean and 0 < len(nothing) < len(weights) and not (sums or composite):
        cause = message("losses_weigh_nothing_on_some_ranks", ranks=nothing)
    elif scaling.is_mean and len({*counts}) > 1 and _are_alike(weights) and not (sums or composite):
        cause = message("ranks_accumulate_different_numbers", micro_batches=counts)
    else:
        loaders = [[record.loader for record in rank.passes] for rank in ranks]
        are_stages = all(any(talk.between for talk in rank.talks) for rank in ranks)
        pairs = zip(micro_batches, loaders)
        composite |= any(several_losses(of_rank, of_loaders, are_stages) for of_rank, of_loaders in pairs)
        rank_weight = (
            sum(weight.largest for of_rank in weights for weight in of_rank if weight) / gradients.size / scale
        )
        # Gradients that are no mean are not explained by the weights of a loss's terms.
        if not sums and (not composite or not scaling.is_mean):
            cause = scaling.cause(rank_weight)
            if not cause and scaling.is_mean and (undivided := _undivided_of_some(micro_batches, scale)):
                cause = message("some_losses_not_divided_by_accumulation", undivided=undivided, micro_batches=counts[0])
        elif scaling.is_mean and _is_undivided(micro_batches, loaders, scale):
            cause = message("loss_not_divided_by_accumulation", micro_batches=gradients.micro_batches)
            total = float(gradients.micro_batches)
    if cause:
        what = "total weight of the losses"
        return differs(QUESTION, what, cause, step=step, expected=1.0, found=round(total, 9))
    on_purpose = message("terms_may_be_weighted_on_purpose") if sums or composite else None
    said = message("losses_have_an_unknown_factor", weight=total, on_purpose=on_purpose)
    return Finding(QUESTION, "unknown", said)


def _is_undivided(
    micro_batches: Sequence[Sequence[MicroBatchRecord]], loaders: Sequence[Sequence[int]], scale: float
) -> bool:
    """Returns whether the first term of each micro-batch's loss is a mean of weight one, and nothing divides a term by
    the number of micro-batches: of losses of several terms, or of sums that are divided by what a mask leaves."""
    for of_rank, of_loaders in zip(micro_batches, loaders):
        count = len(of_rank)
        if count < 2 or several_losses(of_rank, of_loaders):
            return False
        for terms in (micro_batch.losses for micro_batch in of_rank):
            if not terms or abs(max(abs(_as_mean(term)) for term in terms) / scale - 1) > TOLD_APART:
                return False
            if any(abs(abs(factor) * count - 1) < TOLD_APART for term in terms for factor in term.factors):
                return False
    return True


def _undivided_of_some(micro_batches: Sequence[Sequence[MicroBatchRecord]], scale: float) -> list[int]:
    """Returns the micro-batches whose loss is a mean of weight one, where the others' is divided by the number of
    micro-batches, three or more of as many values; [] where they are none of these, or others on another rank."""
    undivided = list[list[int]]()
    for of_rank in micro_batches:
        terms, count = [micro_batch.losses for micro_batch in of_rank], len(of_rank)
        if count < 3 or any(len(losses) != 1 for losses in terms) or len({losses[0].count for losses in terms}) > 1:
            return []
        weights = [abs(losses[0].weight) / scale for losses in terms]
        if not all(abs(weight - 1) < TOLD_APART or abs(weight * count - 1) < TOLD_APART for weight in weights):
            return []
        undivided.append([number for number, weight in enumerate(weights) if abs(weight - 1) < TOLD_APART])
    return undivided[0] if all(numbers == undivided[0] for numbers in undivided) else []


def _unequal_targets(micro_batches: Sequence[Sequence[MicroBatchRecord]], step: int) -> Finding | None:
    """Finds targets (or tokens) that weigh more than others in the same step."""
    if uneven := targets(micro_batches):
        rank, ratio = uneven
        counts = [len(of_rank) for of_rank in micro_batches]
        cause = message("mean_of_means_over_ranks", rank=rank, other=0, ratio=ratio)
        if len({*counts}) > 1:
            cause = message("micro_batch_skipped_on_some_ranks", micro_batches=counts)
        return differs(QUESTION, "weight of a target", cause, step=step, rank=rank, expected=1.0, found=ratio)
    for rank, of_rank in enumerate(micro_batches):
        if uneven := accumulated_targets(of_rank):
            number, ratio = uneven
            cause = message("mean_of_means_over_micro_batches", micro_batch=number, ratio=ratio)
            return differs(QUESTION, "weight of a target", cause, step=step, rank=rank, expected=1.0, found=ratio)
    return None


def _without_weights(scaling: Scaling) -> Finding:
    if scaling.is_mean and scaling.micro_batches == 1:
        return Finding(QUESTION, "right", message("gradient_is_mean_of_one_micro_batch_each"))
    if scaling.is_mean:
        return Finding(QUESTION, "unknown", message("division_of_accumulated_losses_not_seen"))
    return Finding(QUESTION, "unknown", message("loss_may_be_divided_beforehand", factor=scaling.reduced))


def loss_weights(terms: Sequence[LossRecord]) -> LossWeight | None:
    """Returns the weight of a loss; None where a term is not known. A sum counts as so many means of one value."""
    if not terms or any(term.reduction == "unknown" for term in terms):
        return None
    weights = [_as_mean(term) for term in terms]
    if max(weights) < 0:  # a mean that the training increases, as -logsigmoid(…).mean()
        weights = [-weight for weight in weights]
    return LossWeight(max(weights, key=abs), sum(weights))


def _as_mean(term: LossRecord) -> float:
    return term.weight * (term.count if term.reduction == "sum" else 1)


def _weigh_nothing(weights: Sequence[LossWeight | None]) -> bool:
    """Returns whether a rank's losses are all multiplied by zero."""
    return bool(weights) and all(weight is not None and weight.largest == 0 for weight in weights)


def _are_alike(weights: Weights) -> bool:
    """Returns whether the losses of all ranks and micro-batches have the same weight."""
    largest = [weight.largest for of_rank in weights for weight in of_rank if weight]
    return bool(largest) and max(largest) - min(largest) <= TOLD_APART * max(largest)


def several_losses(micro_batches: Sequence[MicroBatchRecord], loaders: Sequence[int], is_stage: bool = False) -> bool:
    """Returns whether the micro-batches of a step are terms of one loss, each with its own backward(), and no
    accumulation.

    They are of the same rows, of other kinds of losses, or of several loaders; their weights need not add up to one.
    loaders: pass over a loader -> the loader. is_stage: whether the rank hands on what it computes between its passes.
    """
    rows = [frozenset(micro_batch.rows) for micro_batch in micro_batches if micro_batch.rows]
    kinds = {tuple(term.kind for term in micro_batch.losses) for micro_batch in micro_batches}
    # A pipeline may have the forward passes of all micro-batches before the first backward pass.
    counts = [micro_batch.forwards for micro_batch in micro_batches]
    ahead = is_stage and sum(counts[:1]) >= len(counts) and not any(counts[1:])
    used = {
        frozenset(loaders[number] for number in micro_batch.passes if number < len(loaders))
        for micro_batch in micro_batches
        if micro_batch.forwards or not ahead
    }
    return len(rows) > len({*rows}) or len(kinds) > 1 or len(used) > 1


def total_weight(weights: Weights, factor: float, near_one: Callable[[float], bool]) -> float:
    """Returns the factor of the gradients' sum times the weights of all losses; 1 in a weighted mean."""
    known = [weight for of_rank in weights for weight in of_rank if weight]
    largest = factor * sum(weight.largest for weight in known)
    together = factor * sum(weight.together for weight in known)
    return together if near_one(together) else largest


def targets(micro_batches: Sequence[Sequence[MicroBatchRecord]]) -> tuple[int, float] | None:
    """Returns (rank, how much more a target weighs there than on rank 0), where ranks with unequal numbers of targets,
    or of micro-batches, weigh them unequally in the same micro-batch; None where they do not."""
    for of_ranks in zip(*micro_batches):
        if any(len(micro_batch.losses) != 1 or not micro_batch.losses[0].count for micro_batch in of_ranks):
            continue
        terms = [micro_batch.losses[0] for micro_batch in of_ranks]
        weights = [_as_mean(term) / term.count for term in terms]
        for rank, weight in enumerate(weights):
            uneven = terms[rank].count != terms[0].count or len(micro_batches[rank]) != len(micro_batches[0])
            if weights[0] and uneven and abs(weight / weights[0] - 1) > TOLD_APART:
                return rank, weight / weights[0]
    return None


def accumulated_targets(micro_batches: Sequence[MicroBatchRecord]) -> tuple[int, float] | None:
    """Returns (micro-batch, how much more a target weighs there than in the first), of micro-batches with as many rows
    each, but other numbers of targets; None where they weigh the same. A shorter last batch is not judged."""
    terms = [batch.losses[0] for batch in micro_batches if len(batch.losses) == 1 and batch.losses[0].count]
    rows = {len(batch.rows) for batch in micro_batches}
    if len(terms) < len(micro_batches) or len(rows) > 1 or 0 in rows:
        return None
    weights = [_as_mean(term) / term.count for term in terms]
    for number, weight in enumerate(weights):
        if weights[0] and terms[number].count != terms[0].count and abs(weight / weights[0] - 1) > TOLD_APART:
            return number, weight / weights[0]
    return None


@dataclass(frozen=True)
class Scaling:
    """How gradients are scaled. factor: of their sum over ranks and micro-batches, without a gradient scaler's.

    size: ranks. micro_batches: of this step; most: of any step.
    """

    factor: float
    size: int
    micro_batches: int
    most: int

    @property
    def reduced(self) -> float:
        """The factor of the mean over ranks: 1 where the gradients are averaged."""
        return self.factor * self.size

    @property
    def is_mean(self) -> bool:
        return self.near_one(self.reduced)

    @staticmethod
    def near_one(value: float) -> bool:
        return abs(value - 1) < TOLD_APART

    def cause(self, rank_weight: float) -> Message | None:
        """Returns why the weights do not add up to one; None where no known mistake explains it.

        rank_weight: of one rank's losses, added up over its micro-batches: 1 where each is divided by their number.
        """
        count, size = self.micro_batches, self.size
        if size > 1 and self.near_one(self.reduced / size):
            return message("gradients_summed_over_ranks", ranks=size)
        if size > 1 and self.near_one(self.reduced * size):
            return message("gradients_divided_by_ranks_again", ranks=size)
        if count > 1 and self.near_one(self.reduced * count) and self.near_one(rank_weight):
            return message("losses_divided_by_accumulation_twice", micro_batches=count)
        if not self.is_mean:
            return None
        if count > 1 and self.near_one(rank_weight / count):
            return message("loss_not_divided_by_accumulation", micro_batches=count)
        if count < self.most and self.near_one(rank_weight * self.most / count):
            return message("short_window_divided_by_full_one", micro_batches=count, most=self.most)
        if count > 1 and self.near_one(rank_weight * count):
            return message("losses_divided_by_accumulation_twice", micro_batches=count)
        if self.near_one(rank_weight * size):
            return message("loss_divided_by_ranks", ranks=size)
        if self.near_one(rank_weight / size):
            return message("loss_multiplied_by_ranks", ranks=size)
        return None
