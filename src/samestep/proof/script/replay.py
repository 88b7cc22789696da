"""Judges whether one process, fed with the batches of the ranks, takes the steps of the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from samestep.bounds import (
    COARSER,
    FIRST_ROUNDING,
    FIRST_STEP_APART,
    FLOAT32_ROUNDING,
    LATER_STEPS_APART,
    LEFT_BY_FACTOR,
    LOSS_APART,
    RATE_APART,
    ROUNDING_GROWS,
    TOLD_APART,
    WEIGHTS_APART,
)
from samestep.message import Message, message
from samestep.proof.resumed_step import same_rates
from samestep.proof.script.coefficients import multiplied_sum
from samestep.proof.script.findings import Ranks, differs
from samestep.proof.script.fit import Array, multiple_of, norm
from samestep.proof.script.gradient_weights import are_of_numbers
from samestep.proof.script.gradients import reduced_by_optimizer
from samestep.proof.script.losses import same_loss
from samestep.proof.script.step_gradients import StepGradients, norm_of_all
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import ENGINE_CLIPPING, STEP, TAKEN, UNCLIPPED, ScriptRecord, of_kind
from samestep.records.script_plan import ReplayRecord

OWN_ROWS = "rows_normalised_by_own_rank"
GRADIENT: Question = "replayed gradient"
RATE: Question = "replayed rate"
WEIGHT: Question = "replayed weights"
MICRO_BATCHES: Question = "replayed micro-batches"


def coarser_of(ranks: Ranks) -> float:
    """Returns how much coarser than float32's the bounds of a script are."""
    first = ranks[0].steps[0]
    return max(COARSER.get(dtype, 1.0) for dtype in [*first.dtypes, *first.computed] or ["float32"])


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
    distances, first, coarser = list[float](), 0.0, coarser_of(ranks)
    for step in range(len(one_process.steps)):
        gradients, replayed = StepGradients.read(record, ranks, step), _before_clipping(replay, step)
        if not gradients.names:
            continue
        if by_optimizer := reduced_by_optimizer(gradients, ranks, step):
            gradients = gradients.as_mean()
        if broken := gradients.not_finite():
            said = message("gradient_of_rank_not_finite", parameter=broken[1], rank=broken[0], step=step)
            return not_replayed(said)
        scale = (ranks[0].steps[step].scale or 1.0) / (one_process.steps[step].scale or 1.0)
        replayed = {name: gradient * scale for name, gradient in replayed.items()}
        if missing := [name for name in gradients.names if name not in replayed]:
            return not_replayed(message("replay_has_no_gradient", parameter=missing[0]))
        recorded, calls = gradients.reduced[0], ranks[0].steps[step].calls
        apart = {name: recorded[name] - replayed[name] for name in gradients.names}
        size = norm_of_all(recorded, gradients.names)
        # Rounding is relative to the terms before they cancel, and to the size of the whole gradient at most.
        added_up = {name: gradients.size_of_parts(name) * abs(gradients.factor) for name in gradients.names}
        off = {name: norm(apart[name]) / max(added_up[name], TOLD_APART * size) for name in gradients.names}
        name = max(off, key=lambda parameter: off[parameter])
        inside = calls > 1  # the last call of a closure, at weights inside of the step
        bound = (LATER_STEPS_APART if step or inside else FIRST_STEP_APART) * coarser
        first = off[name] if not distances else first
        distances.append(norm_of_all(apart, gradients.names) / (size or 1.0) / coarser)
        if off[name] > bound and inside:
            said = message("closure_gradient_apart", step=step, distance=off[name], parameter=name, calls=calls)
            return Finding(GRADIENT, "unknown", said)
        if off[name] > bound and gradients.is_compressed:
            return Finding(GRADIENT, "unknown", message("gradients_compressed_by_hook", step=step))
        if not math.isfinite(off[name]):
            return Finding(GRADIENT, "unknown", message("replayed_gradient_not_finite", parameter=name, step=step))
        if off[name] > bound and scale != 1.0:
            scales = [step_record.steps[step].scale for step_record in (ranks[0], one_process)]
            said = message("scaler_skips_other_steps", step=step, recorded=scales[0], replayed=scales[1])
            return Finding(GRADIENT, "unknown", said)
        if off[name] > bound and (grown := grown_rounding(distances, step)):
            return grown
        if off[name] > bound:
            came_apart = any(
                distance > FIRST_STEP_APART for distance in distances[1:-1]
            )  # and the gradients were within the bound until now
            cause = message("steps_come_apart")
            if not came_apart:
                cause = _cause(ranks, step, gradients, replayed, sizes=sizes, in_turn=result.feed == "in turn")
                # Where other weights of the ranks give one process's gradient, gathers and negatives are not the cause.
                if not gradients.shares_in(replayed):
                    cause = _of_contrast(ranks, one_process, step, cause) or cause
                if cause.id == "later_gradients_apart" and by_optimizer:
                    cause = message("optimizer_adds_gradients_up")
            return differs(
                GRADIENT,
                "gradient against one process",
                cause,
                step=step,
                tensor=name,
                expected=message("a_norm", norm=norm(replayed[name])),
                found=message("a_norm", norm=norm(recorded[name])),
            )
        if finding := _clipped(gradients, replay, step, bound):
            return finding
    fed = message("fed_by_rank") if result.feed == "by rank" else message("fed_as_one")
    if result.feed == "in turn":
        fed = message("fed_in_turn")
    means = message("mean_losses_were_averaged") if result.means else None
    return Finding(
        GRADIENT, "right", message("gradient_of_one_process", distance=first, fed=fed, means=means, told=None)
    )


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


def grown_rounding(distances: Sequence[float], step: int) -> Finding | None:
    """Returns that a step cannot be judged where the distances of the steps so far begin at the size of rounding and
    grow by no more than ROUNDING_GROWS a step.

    Training makes rounding grow that fast; a mistake has its whole size at the step that makes it.
    """
    grown = [max(distance, FLOAT32_ROUNDING) for distance in distances]
    slowly = all(after <= ROUNDING_GROWS * before for before, after in pairwise(grown))
    if len(distances) <= 2 or distances[0] > FIRST_ROUNDING or not slowly:
        return None
    shown = [float(f"{distance:.0e}") for distance in distances[-4:]]
    return Finding(GRADIENT, "unknown", message("rounding_grows", steps=step, distances=shown))


def _clipped(gradients: StepGradients, replay: Record, step: int, bound: float) -> Finding | None:
    """Returns the mistake where gradients that were the same differ after the script has clipped or changed them."""
    recorded, replayed = gradients.taken[0], of_kind(replay.arrays(STEP.format(step)), TAKEN)
    off = {name: norm(recorded[name] - replayed[name]) for name in gradients.names}
    name = max(off, key=lambda parameter: off[parameter])
    if not gradients.clipped or off[name] <= bound * norm_of_all(replayed, gradients.names):
        return None
    cause = message("clipping_depends_on_ranks")
    return differs(
        GRADIENT,
        "clipped gradient against one process",
        cause,
        step=step,
        tensor=name,
        expected=message("a_norm", norm=norm(replayed[name])),
        found=message("a_norm", norm=norm(recorded[name])),
    )


def _before_clipping(replay: Record, step: int) -> dict[str, Array]:
    arrays: Mapping[str, Array] = replay.arrays(STEP.format(step))
    return of_kind(arrays, TAKEN) | of_kind(arrays, UNCLIPPED)


def _cause(
    ranks: Ranks,
    step: int,
    gradients: StepGradients,
    of_one_process: Mapping[str, Array],
    *,
    sizes: Sequence[int],
    in_turn: bool,
) -> Message:
    """Returns why the ranks' gradient is not that of one process: first what was tried, and gives it."""
    pair = (gradients.reduced[0], of_one_process)
    recorded, replayed = (np.concatenate([arrays[name] for name in gradients.names]) for arrays in pair)
    factor, left = multiple_of(recorded, replayed)
    size = next(
        (size for size in sizes if any(abs(factor / divisor - 1) <= TOLD_APART for divisor in (size, 1 / size))),
        sizes[0],
    )
    # A gradient that is nearly one process's may differ in some elements alone, which no factor explains.
    if factor and left <= min(TOLD_APART * norm(recorded), LEFT_BY_FACTOR * norm(recorded - replayed)):
        is_fraction, is_multiple = abs(factor * size - 1) <= TOLD_APART, abs(factor / size - 1) <= TOLD_APART
        if in_turn and is_fraction:
            return message("accumulation_not_divided_in_one_process", ranks=size)
        if is_fraction:
            return message("gradient_divided_by_the_ranks", ranks=size, told=None)
        if is_multiple:
            return message("gradient_multiplied_by_the_ranks", ranks=size, told=None)
        return message("loss_is_scaled", factor=factor, told=None)
    if weighed := gradients.shares_in(of_one_process):
        number, shares = weighed
        micro_batches = [rank.steps[step].micro_batches[number : number + 1] for rank in ranks]
        if all(micro_batches) and are_of_numbers(micro_batches, np.array(shares)[:, None]):
            return message("mean_of_rank_means", ranks=len(ranks), shares=[round(share, 4) for share in shares])
    if _are_even(ranks, step):
        return message("later_gradients_apart") if step else message("loss_depends_on_ranks")
    counts = [len(rank.steps[step].micro_batches) for rank in ranks]
    if len(set(counts)) > 1:
        return message("micro_batch_skipped_on_some_ranks", micro_batches=counts)
    return message("mean_of_rank_means_or_a_term")


def _of_contrast(ranks: Ranks, one_process: ScriptRecord, step: int, cause: Message) -> Message | None:
    """Returns why a loss that tells rows of the batch apart has another gradient than in one process; None where it is
    none of these, or the ranks' gradient is a multiple of one process's for another reason."""
    if cause.id not in ("loss_depends_on_ranks", "gradient_divided_by_the_ranks", "mean_of_rank_means_or_a_term"):
        return None
    calls = [call for rank in ranks for group in rank.groups.values() for call in group.calls]
    gathers = any("gather" in call for call in calls) and not ranks[0].steps[step].shards
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
