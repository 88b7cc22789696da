"""Judges whether N ranks train a job as one process does; where not, what is expected to differ, or which mistake the
job makes."""

from __future__ import annotations

from math import isclose, isfinite

from samestep.message import Message, message
from samestep.proof.compare import bound_of
from samestep.proof.trace import EPS, Expectation
from samestep.records.inspection import JobFacts
from samestep.records.record import ReferenceLayoutRecord, SeparationRecord
from samestep.records.results import OneProcess

ReasonAndAdvice = tuple[Message, Message]


def same_as_one(ranks: Expectation, single: Expectation) -> tuple[bool, float]:
    """Whether N-replica training of a job is plain training in one process: whether both end with the same parameters
    up to rounding, and how far these differ."""
    bounds, from_one = _bounds(ranks, single), ranks.facts.from_one
    same = bool(from_one) and all(off.distance <= bounds[name] for name, off in from_one.items())
    return same, max((off.distance for off in from_one.values()), default=0.0)


def _bounds(ranks: Expectation, single: Expectation) -> dict[str, float]:
    """Returns for each parameter the largest difference between N replicas and one that rounding explains."""
    eps = max(EPS[expectation.facts.dtype] for expectation in (ranks, single))  # an engine may take no float64
    spreads = [spread for expectation in (ranks, single) if (spread := expectation.noise_distances("sgd"))]
    moved, from_one = ranks.of("sgd").moved, ranks.facts.from_one
    furthest = max((moved[name].distance for name in from_one), default=0.0)
    return {
        name: bound_of(
            max(spread[name] for spread in spreads),
            eps,
            largest=off.largest,
            largest_before=moved[name].largest_before,
            furthest=furthest,
        )
        for name, off in from_one.items()
    }


def not_one_process(worst: float, ranks: Expectation, single: Expectation, job: JobFacts) -> OneProcess:
    """Says why N replicas do not train as one process, whose parameters differ by `worst`.

    ranks, one: N replicas and plain training, both without random numbers and batch statistics. What then remains is a
    mistake.
    """
    same, _ = same_as_one(ranks, single)
    separation = single.facts.separation
    assert separation is not None
    constant_fails = ranks.facts.draws and not isfinite(separation.whole)  # a mean over nothing, say
    if same or separation.unknown or separation.collate_draws or constant_fails:
        reason, advice = natural_causes(job, ranks.facts, separation, hides=not same or constant_fails)
        return OneProcess("no, as expected", worst, reason, advice)
    bounds, from_one = _bounds(ranks, single), ranks.facts.from_one
    furthest = max(from_one, key=lambda name: from_one[name].distance / (bounds[name] or 1.0), default=None)
    off = None
    if furthest is not None:
        off = message(
            "tensor_further_off_than_rounding",
            tensor=furthest,
            distance=from_one[furthest].distance,
            bound=bounds[furthest],
        )
    reason, advice = mistake(separation, single.facts.dtype, job, off)
    return OneProcess("no", worst, reason, advice)


def natural_causes(
    job: JobFacts, neutral: ReferenceLayoutRecord, separation: SeparationRecord, *, hides: bool
) -> ReasonAndAdvice:
    """Names what is expected to differ: BatchNorm and random numbers.

    hides: whether some random numbers are not constant in the neutral trainings: a mistake could hide behind them.
    """
    reasons, advice = [], []
    if separation.collate_draws:
        reasons.append(message("collate_draws_for_each_rank"))
        advice.append(message("draw_for_each_sample"))
    if neutral.batch_statistics:
        reasons.append(message("batchnorm_of_each_ranks_rows", layer=next(iter(job.batch_layers), None)))
        advice.append(message("use_groupnorm_or_sync_batchnorm"))
    if neutral.draws and job.random_layers:
        reasons.append(message("dropout_of_each_rank", layer=job.random_layers[0]))
        advice.append(message("random_numbers_need_no_change"))
    elif neutral.draws:
        reasons.append(message("forward_draws_on_each_rank"))
        advice.append(message("random_numbers_in_a_mean_over_rows"))
    if not reasons:
        reasons.append(message("random_numbers_outside_torch"))
        advice.append(message("draw_with_torch"))
    if hides:
        unknown = separation.unknown or (["collate"] if separation.collate_draws else [])
        reasons.append(
            message("mistake_could_hide_behind_random_numbers", operations=unknown)
            if unknown
            else message("loss_not_finite_with_constant_numbers")
        )
    return _listed(reasons), _listed(advice)


def _listed(messages: list[Message]) -> Message:
    """Returns one message for one to four."""
    if len(messages) == 1:
        return messages[0]
    first, second, third, fourth = (*messages, None, None)[:4]
    return message("several", first=first, second=second, third=third, fourth=fourth)


def mistake(separation: SeparationRecord, dtype: str, job: JobFacts, off: Message | None) -> ReasonAndAdvice:
    """Names the mistake of a job whose ranks differ from one process without random numbers and batch statistics.

    off: which weight differs most, for a mistake that the losses do not show.
    """
    losses = _Losses(separation, dtype)
    if not losses.same(separation.again, separation.whole):
        return _keeps_state(separation)
    if job.gather_outputs:
        return _in_forward(separation, losses)
    if losses.is_mean(losses.weights):
        if separation.moved:
            return _keeps_state(separation)
        if job.carry_state:
            return message("carried_state_mixes_rows", off=off), message("carry_state_of_each_row")
        return message("training_depends_on_ranks", off=off), message("look_for_what_is_done_once_per_batch")
    if losses.same(separation.whole, sum(separation.alone)):
        return message("criterion_is_a_sum"), message("return_the_mean")
    if len(set(losses.weights)) > 1 and losses.is_mean([1.0] * len(losses.weights)):
        return message("criterion_ignores_job_weight"), message("weigh_rows_in_criterion")
    if losses.output_depends_on_other_rows():
        return message("output_depends_on_rows_beside"), message("mask_what_is_padded")
    ratios = losses.ratios()
    if ratios and losses.is_mean(ratios):
        if 0.0 in ratios:
            reason = message("rows_that_weigh_nothing", count=ratios.count(0.0), rows=len(ratios))
            return reason, message("give_weight_0_to_ignored_rows")
        factor = max(ratios) / min(ratios)
        return message("rows_weigh_unequally", rows=len(ratios), factor=factor), message("give_weight_of_each_row")
    return message("criterion_looks_at_other_rows"), message("gather_outputs_of_all_ranks")


def _in_forward(separation: SeparationRecord, losses: _Losses) -> ReasonAndAdvice:
    """Of a job whose criterion sees all rows: what is left are its forward pass and what is done once for each step."""
    if losses.output_depends_on_other_rows():
        return message("output_depends_on_rows_beside"), message("mask_what_is_padded")
    if separation.moved:
        return _keeps_state(separation)
    return message("forward_returns_no_mean_over_rows"), message("compute_it_in_criterion")


def _keeps_state(separation: SeparationRecord) -> ReasonAndAdvice:
    return message("state_kept_from_batch_to_batch", names=separation.moved), message("keep_no_state_between_batches")


class _Losses:
    """The losses of a separation, compared up to rounding."""

    def __init__(self, separation: SeparationRecord, dtype: str) -> None:
        self.separation, self.weights = separation, separation.weights
        self.visible = EPS[dtype] ** 0.5

    def same(self, loss: float, expected: float) -> bool:
        losses = [*self.separation.alone, self.separation.whole]
        scale = max((abs(loss) for loss in losses if isfinite(loss)), default=0.0)
        return isclose(loss, expected, rel_tol=self.visible, abs_tol=self.visible * scale)

    def output_depends_on_other_rows(self) -> bool:
        gap = self.separation.output_gap
        return gap is not None and gap > self.visible

    def is_mean(self, weights: list[float]) -> bool:
        """Whether the rows' loss is the mean of theirs with these weights, and the halves' losses are, too."""
        alone, half = self.separation.alone, len(self.separation.alone) // 2
        batches = [(self.separation.whole, alone, weights)]
        if half:
            first, second = self.separation.halves
            batches += [(first, alone[:half], weights[:half]), (second, alone[half:], weights[half:])]
        return all(
            self.same(loss, _mean(row_losses, row_weights)) if any(row_weights) else _weighs_nothing(loss)
            for loss, row_losses, row_weights in batches
        )

    def ratios(self) -> list[float]:
        """What each row weighs, the first weighing 1, if a pair's loss is their weighted mean; empty if it is not.

        Where the first row has weight 0, pairs with it say nothing, and equal weights are assumed for the others.
        """
        first, ratios = self.separation.alone[0], [1.0]
        if _weighs_nothing(first):
            return [0.0 if _weighs_nothing(loss) else 1.0 for loss in self.separation.alone]
        for loss, pair in zip(self.separation.alone[1:], self.separation.pairs):
            if _weighs_nothing(loss) and self.same(pair, first):
                ratios.append(0.0)
                continue
            if self.same(loss, first) or self.same(pair, loss):
                return []
            ratios.append((first - pair) / (pair - loss))
        return ratios if all(isfinite(ratio) and ratio >= 0 for ratio in ratios) else []


def _weighs_nothing(loss: float) -> bool:
    """Whether a row's loss alone is that of a mean over nothing: 0 / 0, or 0 where the divisor is at least 1."""
    return loss == 0 or not isfinite(loss)


def _mean(losses: list[float], weights: list[float]) -> float:
    total = sum(weights)
    return sum(loss * weight for loss, weight in zip(losses, weights) if weight) / total if total else float("nan")
