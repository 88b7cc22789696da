"""Judges whether one process, fed with the batches of the ranks, takes the steps of the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from samestep.bounds import LEFT_BY_FACTOR, LOSS_APART, RATE_APART, TOLD_APART, WEIGHTS_APART
from samestep.judge.coefficients import multiplied_sum
from samestep.judge.findings import Ranks, differs
from samestep.judge.fit import Array, is_times, multiple_of, norm
from samestep.judge.gradient_comparison import (
    GRADIENT,
    GradientComparison,
    StepAgainstOne,
    bound_of_step,
    first_difference,
)
from samestep.judge.gradient_weights import are_of_numbers
from samestep.judge.gradients import reduced_by_optimizer
from samestep.judge.losses import same_loss
from samestep.judge.step_gradients import (
    StepGradients,
    before_clipping,
    coarser_of,
    computed_gradients,
    norm_of_all,
)
from samestep.message import Message, message
from samestep.proof.resumed_step import same_rates
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import ENGINE_CLIPPING, STEP, TAKEN, ScriptRecord, of_kind
from samestep.records.script_plan import ReplayRecord

OWN_ROWS = "rows_normalised_by_own_rank"
RATE: Question = "replayed rate"
WEIGHT: Question = "replayed weights"
MICRO_BATCHES: Question = "replayed micro-batches"


def not_replayed(why: Message) -> Finding:
    """Returns the answer where there is no replay to judge."""
    return Finding("replay", "unknown", message("not_replayed", why=why))


def judge_replay(
    result: ReplayRecord, ranks: Ranks, one_process: ScriptRecord, record: Record, replay: Record, *, size: int = 0
) -> list[Finding]:
    """Compares a replay with the ranks. record, replay: the folders with the gradients. size: how many ranks there are,
    where each of these records is of several."""
    recorded = len(ranks[0].steps[0].micro_batches)
    if result.why_not and result.micro_batches not in (-1, recorded, recorded * len(ranks)):
        cause = message(
            "accumulation_depends_on_ranks",
            micro_batches=recorded,
            ranks=len(ranks),
            replayed=result.micro_batches,
            together=recorded * len(ranks),
        )
        expected, found = recorded * len(ranks), result.micro_batches
        return [differs(MICRO_BATCHES, "micro-batches of a step", cause, step=0, expected=expected, found=found)]
    if result.why_not and result.why_not.id == OWN_ROWS:
        wanted, on_ranks = message("rows_of_one_process"), message("rows_normalised_on_each_rank")
        return [differs(GRADIENT, "rows of the model", result.why_not, step=0, expected=wanted, found=on_ranks)]
    if result.why_not:
        return [not_replayed(result.why_not)]
    if len(one_process.steps) != len(ranks[0].steps):
        steps = len(one_process.steps)
        return [not_replayed(message("replay_takes_other_steps", steps=steps, recorded=len(ranks[0].steps)))]
    sizes = [len(ranks), size or len(ranks)]
    gradients = _gradients(result, ranks, one_process, record=record, replay=replay, sizes=sizes)
    if gradients.answer == "right":
        gradients = _clipped_by_engine(ranks[0], one_process) or gradients
    findings = [gradients, replayed_rates(result, ranks, one_process, size or len(ranks))]
    if gradients.answer == "right" and (multiplied := multiplied_sum(ranks, one_process)):
        findings.append(multiplied)
    if (gradients.question, gradients.answer) == (GRADIENT, "unknown"):
        return [*findings, Finding(WEIGHT, "unknown", message("gradients_came_apart_before"))]
    return [*findings, replayed_weights(result, len(one_process.steps), coarser_of(ranks))]


def _gradients(
    result: ReplayRecord,
    ranks: Ranks,
    one_process: ScriptRecord,
    *,
    record: Record,
    replay: Record,
    sizes: Sequence[int],
) -> Finding:
    """Compares the gradients of each step, until one is another one. sizes: numbers of replicas, and of ranks."""
    steps = _steps(ranks, one_process, record, replay, sizes=sizes, in_turn=result.feed == "in turn")
    finding, distance = first_difference(steps)
    if finding:
        return finding
    fed = message("fed_by_rank") if result.feed == "by rank" else message("fed_as_one")
    if result.feed == "in turn":
        fed = message("fed_in_turn")
    means = message("mean_losses_were_averaged") if result.means else None
    return Finding(
        GRADIENT, "right", message("gradient_of_one_process", distance=distance, fed=fed, means=means, told=None)
    )


def _steps(
    ranks: Ranks, one_process: ScriptRecord, record: Record, replay: Record, *, sizes: Sequence[int], in_turn: bool
) -> Iterator[StepAgainstOne | Finding]:
    """Yields each step whose gradients are known; a finding in place of one that cannot be compared."""
    for number in range(len(one_process.steps)):
        gradients, arrays = StepGradients.read(record, ranks, number), replay.arrays(STEP.format(number))
        if not gradients.names:
            continue
        if by_optimizer := reduced_by_optimizer(gradients, ranks, number):
            gradients = gradients.as_mean()
        if broken := gradients.not_finite():
            rank, name = broken
            yield not_replayed(message("gradient_of_rank_not_finite", parameter=name, rank=rank, step=number))
            return
        replayed = before_clipping(arrays)
        if missing := [name for name in gradients.names if name not in replayed]:
            yield not_replayed(message("replay_has_no_gradient", parameter=missing[0]))
            return
        scale = (ranks[0].steps[number].scale or 1.0) / (one_process.steps[number].scale or 1.0)
        replayed = {name: replayed[name] * scale for name in gradients.names}
        yield _ReplayedStep(
            ranks=ranks,
            one_process=one_process,
            number=number,
            gradients=gradients,
            replayed=replayed,
            computed={name: array * scale for name, array in computed_gradients(arrays).items()},
            taken=of_kind(arrays, TAKEN),
            scale=scale,
            sizes=sizes,
            in_turn=in_turn,
            by_optimizer=by_optimizer,
        )


@dataclass(frozen=True)
class _ReplayedStep:
    """One step of the ranks, and what one process has computed of their batches."""

    ranks: Ranks
    one_process: ScriptRecord

    number: int
    """The number of the step."""

    gradients: StepGradients
    """The gradients of the ranks."""

    replayed: Mapping[str, Array]
    """The gradients of one process, before anything clipped them: parameter -> gradient."""

    computed: Mapping[str, Array]
    """The gradients that the backward passes of one process have computed: parameter -> their sum."""

    taken: Mapping[str, Array]
    """The gradients that the optimizer of one process took: parameter -> gradient."""

    scale: float
    """The factor of the ranks' gradient scaler, as a multiple of the factor in one process."""

    sizes: Sequence[int]
    """The number of replicas, and of ranks."""

    in_turn: bool
    """Whether one process has taken the ranks' batches one after the other, as micro-batches."""

    by_optimizer: bool
    """Whether the optimizer reduces the gradients itself."""

    @cached_property
    def before(self) -> GradientComparison:
        names, reduced = self.gradients.names, self.gradients.reduced[0]
        # Rounding is relative to the terms before they cancel, and to the size of the whole gradient at most.
        least, factor = TOLD_APART * norm_of_all(reduced, names), abs(self.gradients.factor)
        sizes = {(0, name): max(self.gradients.size_of_parts(name) * factor, least) for name in names}
        return GradientComparison({0: reduced}, {0: self.replayed}, self._bound, sizes)

    @cached_property
    def after(self) -> GradientComparison | None:
        if not self.gradients.clipped:
            return None
        wanted = {name: self.taken[name] for name in self.gradients.names}
        sizes = dict.fromkeys([(0, name) for name in wanted], norm_of_all(wanted, [*wanted]))
        return GradientComparison({0: self.gradients.taken[0]}, {0: wanted}, self._bound, sizes)

    @property
    def _bound(self) -> float:
        # The last call of a closure has the weights inside of the step.
        return bound_of_step(coarser_of(self.ranks), is_later=self.number > 0 or self._calls > 1)

    @property
    def _calls(self) -> int:
        return self.ranks[0].steps[self.number].calls

    def not_judged(self) -> Message | None:
        if self._calls > 1:
            fields = {"distance": self.before.worst, "parameter": self.before.furthest[1], "calls": self._calls}
            return message("closure_gradient_apart", step=self.number, **fields)
        if self.gradients.is_compressed:
            return message("gradients_compressed_by_hook", step=self.number)
        if self.scale != 1.0:
            recorded, replayed = (record.steps[self.number].scale for record in (self.ranks[0], self.one_process))
            return message("scaler_skips_other_steps", step=self.number, recorded=recorded, replayed=replayed)
        return None

    @property
    def rounding(self) -> float:
        return self.before.distance_of_all / coarser_of(self.ranks)

    def gradient_finding(self, *, came_apart: bool) -> Finding:
        cause = message("steps_come_apart") if came_apart else self._cause()
        return self._finding(self.before, "gradient against one process", cause)

    def clipping_finding(self, after: GradientComparison) -> Finding:
        return self._finding(after, "clipped gradient against one process", message("clipping_depends_on_ranks"))

    def _finding(self, comparison: GradientComparison, quantity: str, cause: Message) -> Finding:
        holder = comparison.furthest
        return comparison.difference(GRADIENT, quantity, cause, step=self.number, holder=holder, rank=None)

    def _cause(self) -> Message:
        """Returns why the ranks' gradient is not that of one process."""
        if self._is_changed_otherwise():
            return message("gradient_changed_after_backward")
        cause = self._tried_cause()
        # Where other weights of the ranks give one process's gradient, gathers and negatives are not the cause.
        if not self.gradients.shares_in(self.replayed):
            cause = _of_contrast(self.ranks, self.one_process, self.number, cause) or cause
        if cause.id == "later_gradients_apart" and self.by_optimizer:
            return message("optimizer_adds_gradients_up")
        return cause

    def _is_changed_otherwise(self) -> bool:
        """Returns whether the backward passes of the ranks have together the gradient that the backward passes of one
        process have, while something has made another one of it since, alike on all ranks."""
        gradients = self.gradients
        if not gradients.not_mean or not gradients.are_alike():
            return False
        mean = gradients.as_mean().reduced[0]
        if {*mean} - {*self.computed}:
            return False
        computed = {name: self.computed[name] for name in mean}
        comparison = replace(self.before, found={0: mean}, wanted={0: computed})
        return len(comparison.distances) == len(mean) and not comparison.apart

    def _tried_cause(self) -> Message:
        """Returns the first mistake that was tried, and gives the ranks' gradient; else what is known of it."""
        ranks, gradients, names = self.ranks, self.gradients, self.gradients.names
        recorded, replayed = (
            np.concatenate([arrays[name] for name in names]) for arrays in (gradients.reduced[0], self.replayed)
        )
        factor, left = multiple_of(recorded, replayed)
        # A gradient that is nearly one process's may differ in some elements alone, which no factor explains.
        if factor and left <= min(TOLD_APART * norm(recorded), LEFT_BY_FACTOR * norm(recorded - replayed)):
            return self._cause_of_factor(factor)
        if weighed := gradients.shares_in(self.replayed):
            number, shares = weighed
            micro_batches = [rank.steps[self.number].micro_batches[number : number + 1] for rank in ranks]
            if all(micro_batches) and are_of_numbers(micro_batches, np.array(shares)[:, None]):
                return message("mean_of_rank_means", ranks=len(ranks), shares=[round(share, 4) for share in shares])
        if _are_even(ranks, self.number):
            return message("later_gradients_apart") if self.number else message("loss_depends_on_ranks")
        counts = [len(rank.steps[self.number].micro_batches) for rank in ranks]
        if len(set(counts)) > 1:
            return message("micro_batch_skipped_on_some_ranks", micro_batches=counts)
        return message("mean_of_rank_means_or_a_term")

    def _cause_of_factor(self, factor: float) -> Message:
        """Returns why the ranks' gradient is so many times that of one process."""
        for size in self.sizes:
            if is_times(factor, 1 / size) and self.in_turn:
                return message("accumulation_not_divided_in_one_process", ranks=size)
            if is_times(factor, 1 / size):
                return message("gradient_divided_by_the_ranks", ranks=size, told=None)
            if is_times(factor, size):
                return message("gradient_multiplied_by_the_ranks", ranks=size, told=None)
        return message("loss_is_scaled", factor=factor, told=None)


def _clipped_by_engine(rank: ScriptRecord, one_process: ScriptRecord) -> Finding | None:
    """Finds an engine's own clipping to another norm than in one process, which an optimizer as Adam may hide."""
    limits = [
        {g.values.get(ENGINE_CLIPPING) for s in record.steps for g in s.settings} for record in (rank, one_process)
    ]
    if limits[0] == limits[1]:
        return None
    found, expected = (next(iter(sorted(filter(None, values))), 0.0) for values in limits)
    cause = message("clipping_depends_on_ranks")
    return differs(GRADIENT, "limit of clipping", cause, step=0, expected=expected, found=found)


def _of_contrast(ranks: Ranks, one_process: ScriptRecord, step: int, cause: Message) -> Message | None:
    """Returns why a loss that tells rows of the batch apart has another gradient than in one process; None where it is
    none of these, or the ranks' gradient is a multiple of one process's for another reason."""
    if cause.id not in ("loss_depends_on_ranks", "gradient_divided_by_the_ranks", "mean_of_rank_means_or_a_term"):
        return None
    gathers = any(rank.steps[step].gathers or rank.steps[step].cut_gathers for rank in ranks)
    batches = [rank.steps[step].micro_batches for rank in (*ranks, one_process)]
    pairs = [terms for of_ranks in zip(*batches) for terms in zip(*(batch.losses for batch in of_ranks))]
    size = len(ranks)
    if size > 1 and any(
        replayed.classes == size * term.classes > 0
        or (replayed.kind == term.kind and replayed.count == size**2 * term.count > 0)
        for *terms, replayed in pairs
        for term in terms[:1]
    ):
        return message("negatives_of_own_rank", ranks=size)
    is_same = gathers and same_loss(ranks, one_process, step, LOSS_APART * coarser_of(ranks))
    return message("gathered_gradient_incomplete") if is_same else None


def _are_even(ranks: Ranks, step: int) -> bool:
    """Returns whether the losses of all ranks are known to be of as many rows and targets in each micro-batch of a
    step. A sum may be divided by other numbers than it counts, those of tokens that a mask leaves: it needs the same
    weights."""
    micro_batches = [rank.steps[step].micro_batches for rank in ranks]
    counts = [[(len(batch.rows), *(term.count for term in batch.losses)) for batch in rank] for rank in micro_batches]
    weights = [
        [term.weight for batch in rank for term in batch.losses if term.reduction == "sum"] for rank in micro_batches
    ]
    known = all(len(numbers) > 1 and all(numbers) for numbers in counts[0])
    return (
        known and all(of_rank == counts[0] for of_rank in counts) and all(of_rank == weights[0] for of_rank in weights)
    )


def replayed_rates(result: ReplayRecord, ranks: Ranks, one_process: ScriptRecord, size: int) -> Finding:
    """Compares the learning rates of each step with those that one process would have used."""
    steps = ranks[0].steps
    recorded, replayed = [step.rates for step in steps], [step.rates for step in one_process.steps]
    step = next((number for number, rates in enumerate(zip(recorded, replayed)) if not same_rates(*rates)), None)
    if step is None:
        return Finding(RATE, "right", message("rates_are_of_one_process"))
    base_rates = result.recorded_base_rates, result.base_rates
    same_optimizer = [record for record in steps if record.optimizer == steps[step].optimizer]
    number = step if all(len(rates) == len(steps) for rates in base_rates) else 0
    if any(record.schedules for record in same_optimizer) and all(base_rates):
        is_base = not same_rates(base_rates[0][number], base_rates[1][number])
    else:
        # A schedule by hand may be counted in a rank's batches; one factor at each step is the rate itself.
        by_hand = not same_optimizer[0].schedules and (
            (_one_factor(recorded, replayed) and not _warms_up(recorded))
            or falls_from_a_multiple(recorded, replayed, size)
        )
        is_base = by_hand or all(record.rates == same_optimizer[0].rates for record in same_optimizer)
    rate, one_rate = recorded[step][0], replayed[step][0]
    if is_base:
        cause = message("rate_depends_on_ranks", rate=rate, ranks=size, one_process=one_rate, told=None)
        rates = replayed[step], recorded[step]
        return differs(RATE, "learning rate", cause, step=step, rank=0, expected=rates[0], found=rates[1])
    counts = [[len(record.micro_batches) for record in rank.steps] for rank in (ranks[0], one_process)]
    # Where accumulation is divided over the ranks, the schedule is so much shorter, too.
    is_comparable = counts[0] == counts[1] and len(same_optimizer) == len(steps)
    if is_comparable and "accelerate" not in ranks[0].libraries and is_stretched(recorded, replayed, size):
        longer = message("schedule_longer_by_the_ranks", ranks=size, rate=rate, step=step, one_process=one_rate)
        return Finding(RATE, "warning", longer)
    why = message("schedule_counts_batches_of_a_rank")
    if "accelerate" in ranks[0].libraries:
        why = message("accelerate_advances_for_each_process")
    ahead = (is_comparable and is_ahead(recorded, replayed, size)) or None
    said = message("schedule_depends_on_ranks", rate=rate, step=step, one_process=one_rate, why=why, ahead=ahead)
    return Finding(RATE, "unknown", said)


def is_stretched(recorded: Sequence[Sequence[float]], replayed: Sequence[Sequence[float]], size: int) -> bool:
    """Returns whether the ranks reach the rates of one process only after so many times the steps, in a schedule that
    moves. A warm-up may be longer on more ranks on purpose."""
    pairs = list(zip(recorded[::size], replayed))
    moves = len({tuple(rates) for _, rates in pairs}) > 2
    return moves and not _warms_up(recorded) and all(same_rates(*pair) for pair in pairs)


def is_ahead(recorded: Sequence[Sequence[float]], replayed: Sequence[Sequence[float]], size: int) -> bool:
    """Returns whether the ranks reach the rates of one process so many times as early, in a schedule that has
    turned."""
    pairs = list(zip(recorded, replayed[::size]))
    return len(pairs) > 2 and not _warms_up(recorded[: len(pairs)]) and all(same_rates(*pair) for pair in pairs)


def falls_from_a_multiple(recorded: Sequence[Sequence[float]], replayed: Sequence[Sequence[float]], size: int) -> bool:
    """Returns whether all rates only fall, and the ranks' first rate is `size` times one process's.

    The first rate does not depend on the length of a schedule.
    """
    factors = [rate / one_rate for rate, one_rate in zip(recorded[0], replayed[0]) if one_rate]
    falls = all(
        after <= before for rates in (recorded, replayed) for pair in pairwise(rates) for before, after in zip(*pair)
    )
    return bool(factors) and falls and all(math.isclose(factor, size, rel_tol=RATE_APART) for factor in factors)


def _one_factor(recorded: Sequence[Sequence[float]], replayed: Sequence[Sequence[float]]) -> bool:
    """Returns whether the rates of all steps are one factor times those of one process."""
    pairs = [pair for rates in zip(recorded, replayed) for pair in zip(*rates) if any(pair)]
    factors = [rate / one_rate if one_rate else math.inf for rate, one_rate in pairs]
    return bool(factors) and all(math.isclose(factor, factors[0], rel_tol=RATE_APART) for factor in factors)


def _warms_up(recorded: Sequence[Sequence[float]]) -> bool:
    """Returns whether the rate grows in proportion to the steps: then a shorter warm-up has one factor at each step,
    too."""
    rates = [step_rates[0] for step_rates in recorded]
    begin = 0 if rates[0] == 0 else 1
    per_step = [rate / (step + begin) for step, rate in enumerate(rates) if step + begin]
    return len(per_step) < 2 or all(math.isclose(slope, per_step[0], rel_tol=RATE_APART) for slope in per_step)


def replayed_weights(result: ReplayRecord, steps: int, coarser: float) -> Finding:
    """Compares where the weights have gone with where one process has moved them."""
    moved = sum(distance.moved for distance in result.distances.values())
    off = sum(distance.off for distance in result.distances.values())
    if not moved:
        return Finding(WEIGHT, "unknown", message("no_weight_moves"))
    if not math.isfinite(moved):
        return Finding(WEIGHT, "unknown", message("weights_not_finite"))
    apart, bound = math.sqrt(off / moved), WEIGHTS_APART * coarser
    if not apart <= bound:
        return differs(
            WEIGHT,
            "weights against one process",
            message("weights_end_elsewhere"),
            step=steps - 1,
            tensor=max(result.distances, key=lambda name: result.distances[name].off),
            expected=message("at_most_of_the_movement", bound=bound),
            found=round(apart, 6),
        )
    return Finding(WEIGHT, "right", message("weights_are_of_one_process", steps=steps, distance=apart))
