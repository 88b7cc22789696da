"""Judges whether N ranks train a job as one process does; where not, what is expected to differ, or which mistake the
job makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Literal

from samestep.bounds import ABOVE_ZERO, METRIC_APART, TIMES_NOISE
from samestep.message import Message, message
from samestep.proof.compare import bound_of, largest_value, says_nothing
from samestep.proof.trace import EPS, Expectation
from samestep.records.inspection import JobFacts
from samestep.records.reference_record import FromOne, ReferenceLayoutRecord, SeparationRecord
from samestep.records.results import OneProcess

ReasonAndAdvice = tuple[Message, Message]
PlayHeld = Callable[[bool], tuple[Expectation, Expectation]]  # whether numbers are constant -> one process, N replicas

# Mistakes in the weights of rows. Many losses show such a mistake at once; numbers that belong to other rows do not.
OF_ONE_ROW = ("criterion_is_a_sum", "criterion_ignores_job_weight", "rows_that_weigh_nothing", "rows_weigh_unequally")


@dataclass(frozen=True)
class AgainstOne:
    """The tensors of N-replica training beside those of plain training in one process."""

    different: Mapping[str, float]
    """Tensor -> its distance as a multiple of its bound, of the tensors whose difference rounding does not explain."""

    alike: Sequence[str]
    """The other tensors whose bound would show a difference."""

    hidden: Sequence[str]
    """The tensors whose bound says nothing."""

    worst: float
    """The greatest distance of a tensor."""

    shows: bool
    """Whether a tensor moves further than its bound. Where none does, nothing was trained."""

    evaluated_alike: bool
    """Whether the final evaluations agree."""

    steps: int
    """How many steps were trained."""

    @property
    def differs(self) -> bool:
        return bool(self.different) or not self.evaluated_alike

    @property
    def compared(self) -> int:
        """How many tensors were compared; 0 where none of them could show a difference."""
        return len(self.different) + (len(self.alike) if self.shows or self.different else 0)

    @property
    def same(self) -> bool:
        """Whether they agree, where something was compared. Without that they neither agree nor differ."""
        return not self.differs and self.compared > 0

    def answer(
        self,
        answer: Literal["yes", "no, as expected", "no", "not known"],
        reason: Message | None = None,
        advice: Message | None = None,
    ) -> OneProcess:
        """Returns an answer with what was compared for it."""
        tensors = len(self.different) + len(self.alike) + len(self.hidden)
        return OneProcess(answer, self.worst, reason, advice, compared=self.compared, tensors=tensors, steps=self.steps)


def against_one(ranks: Expectation, single: Expectation) -> AgainstOne:
    """Compares N-replica training of a job with plain training in one process: the parameters, buffers and evaluation
    at the end."""
    bounds, from_one = _bounds(ranks, single), _compared(ranks, single)
    moved, eps = ranks.of("sgd").moved, _eps(ranks, single)
    largest = largest_value(off.largest for off in from_one.values())
    movement = {name: moved[name].distance if name in moved else 0.0 for name in from_one}
    within = [name for name, off in from_one.items() if off.distance <= bounds[name]]  # NaN is not
    hidden = [name for name in within if says_nothing(bounds[name], movement[name], largest, eps)]
    return AgainstOne(
        {name: off.distance / (bounds[name] or ABOVE_ZERO) for name, off in from_one.items() if name not in within},
        [name for name in within if name not in hidden],
        hidden,
        worst=max((off.distance for off in from_one.values()), default=0.0),
        shows=any(movement[name] > bounds[name] for name in within if name not in hidden),
        evaluated_alike=_evaluated_alike(ranks, single),
        steps=len(ranks.of("sgd").rates),
    )


def _eps(ranks: Expectation, single: Expectation) -> float:
    """Returns the coarser precision of the two layouts: an engine may take no float64."""
    return max(EPS[expectation.facts.dtype] for expectation in (ranks, single))


def _compared(ranks: Expectation, single: Expectation) -> dict[str, FromOne]:
    """Returns the parameters and buffers that must agree, without those that may count forward passes: the layouts have
    different numbers of these where they take the batch in several parts."""
    passes = {len(expectation.of("sgd").micro_batches[0]) for expectation in (ranks, single)}
    counts = ranks.facts.counts if len(passes) > 1 else ()
    return {
        name: off
        for name, off in ranks.facts.from_one.items()
        if name not in counts and not name.endswith("num_batches_tracked")
    }


def _evaluated_alike(ranks: Expectation, single: Expectation) -> bool:
    """Returns whether the final evaluations agree, where both have been played."""
    want, got = single.of("sgd").evaluation, ranks.of("sgd").evaluation
    if want is None or got is None:
        return True
    eps = _eps(ranks, single)
    noisy = [run.evaluation.sums for run in ranks.facts.trainings["sgd"][1:] if run.evaluation]
    for name in {*want.sums} - {*want.unsteady, *got.unsteady}:
        spread = max((abs(sums[name] - got.sums[name]) for sums in noisy), default=0.0)
        most = max(abs(want.sums[name]), want.weight if name == "loss" else want.rows)
        if not abs(want.sums[name] - got.sums[name]) <= max(TIMES_NOISE * spread, METRIC_APART * eps**0.5 * most):
            return False
    return True


def _bounds(ranks: Expectation, single: Expectation) -> dict[str, float]:
    """Returns how far rounding explains that each parameter and buffer of N replicas is from one process's."""
    eps = _eps(ranks, single)
    spreads = [spread for expectation in (ranks, single) if (spread := expectation.noise_distances("sgd"))]
    moved, parameters = ranks.of("sgd").moved, ranks.of("sgd").parameters
    furthest = max((moved[name].distance for name in parameters if name in moved), default=0.0)
    return {
        name: bound_of(
            max(spread[name] for spread in spreads),
            eps,
            largest=off.largest,
            largest_before=moved[name].largest_before if name in moved else 0.0,
            furthest=furthest,
        )
        for name, off in ranks.facts.from_one.items()
    }


def one_process(ranks: Expectation, single: Expectation, play: PlayHeld, job: JobFacts) -> OneProcess:
    """Says whether N replicas train as one process, and why not. ranks, single: N replicas and plain training. play: as
    of not_one_process."""
    found = against_one(ranks, single)
    if ranks.facts.written:
        reason = message("forward_writes_parameters", names=[*ranks.facts.written])
        return found.answer("no", reason, message("write_no_parameters_in_forward"))
    if found.same:
        return found.answer("yes")
    return not_one_process(found, play, job) if found.differs else _hidden(found, found)


def not_one_process(found: AgainstOne, play: PlayHeld, job: JobFacts) -> OneProcess:
    """Says why N replicas do not train as one process.

    play: plays plain training and N replicas without batch statistics, and with random numbers that each row keeps.
    What then differs is a mistake, unless the numbers could not be held. Where it is in no row's weight, constant
    numbers decide: rows may share what was taken for theirs.
    """
    single, ranks = play(False)
    held, separation = against_one(ranks, single), _separation(single)
    if unheld := _unheld(ranks, separation):
        return _not_known(found, unheld, job, ranks, separation)
    if held.same:
        return found.answer("no, as expected", *natural_causes(job, ranks.facts, separation))
    if not held.differs:
        return _hidden(found, held)
    reason, advice = mistake(separation, single.facts.dtype, job, _furthest_off(ranks, single, held))
    if reason.id in ("rows_that_weigh_nothing", "rows_weigh_unequally"):
        if separation.collate_draws:
            advice = message("give_weight_of_each_batch")
        elif ranks.facts.keyed:
            advice = message("draw_masks_before_the_model")
    if ranks.facts.keyed and reason.id not in OF_ONE_ROW:
        single, ranks = play(True)
        held, separation = against_one(ranks, single), _separation(single)
        if _unheld(ranks, separation) or not held.differs:
            return _not_known(found, message("rows_share_random_numbers"), job, ranks, separation)
        reason, advice = mistake(separation, single.facts.dtype, job, _furthest_off(ranks, single, held))
    return found.answer("no", reason, advice)


def _hidden(found: AgainstOne, hiding: AgainstOne) -> OneProcess:
    """Returns the answer where nothing differs because nothing could be compared. hiding: the comparison in which a
    difference may be hidden."""
    if hiding.hidden:
        reason = message("rounding_hides_every_tensor", tensors=hiding.hidden)
        return found.answer("not known", reason, message("find_what_amplifies_rounding"))
    return found.answer("not known", message("nothing_moves_in_proof"), message("look_at_rate_and_loss"))


def _separation(single: Expectation) -> SeparationRecord:
    assert single.facts.separation is not None
    return single.facts.separation


def _unheld(ranks: Expectation, separation: SeparationRecord) -> Message | None:
    """Returns why the numbers that were held decide nothing; None where they do."""
    if separation.unknown:
        return message("mistake_could_hide_behind_random_numbers", operations=separation.unknown)
    if ranks.facts.draws and not isfinite(separation.whole):  # as of a mean over nothing
        return message("loss_not_finite_with_held_numbers")
    return None


def _not_known(
    found: AgainstOne, why: Message, job: JobFacts, ranks: Expectation, separation: SeparationRecord
) -> OneProcess:
    return found.answer("not known", *natural_causes(job, ranks.facts, separation, why))


def _furthest_off(ranks: Expectation, single: Expectation, held: AgainstOne) -> Message | None:
    """Returns a message about the tensor that is furthest beyond its bound; None where the evaluation alone differs."""
    if not held.different:
        return None
    furthest = max(held.different, key=lambda name: held.different[name])
    distance, bound = ranks.facts.from_one[furthest].distance, _bounds(ranks, single)[furthest]
    return message("tensor_further_off_than_rounding", tensor=furthest, distance=distance, bound=bound)


def natural_causes(
    job: JobFacts, held_randomness: ReferenceLayoutRecord, separation: SeparationRecord, unheld: Message | None = None
) -> ReasonAndAdvice:
    """Names what is expected to differ: BatchNorm and random numbers.

    unheld: why a mistake could hide behind them.
    """
    reasons, advice = [], []
    if separation.collate_draws:
        reasons.append(message("collate_draws_for_each_rank"))
        advice.append(message("draw_for_each_sample"))
    if held_randomness.batch_statistics:
        reasons.append(message("batchnorm_of_each_ranks_rows", layer=next(iter(job.model.batch_layers), None)))
        advice.append(message("use_groupnorm_or_sync_batchnorm"))
    elif held_randomness.running_statistics:
        reasons.append(message("running_statistics_of_each_ranks_rows"))
        advice.append(message("leave_out_running_statistics"))
    if held_randomness.draws and job.model.random_layers:
        reasons.append(message("dropout_of_each_rank", layer=job.model.random_layers[0]))
        advice.append(message("random_numbers_need_no_change"))
    elif held_randomness.draws:
        reasons.append(message("forward_draws_on_each_rank"))
        advice.append(message("random_numbers_need_no_change"))
    if not reasons:
        reasons.append(message("random_numbers_outside_torch"))
        advice.append(message("draw_with_torch"))
    if unheld:
        reasons.append(unheld)
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
        if (separation.gradient_gap or 0.0) > losses.visible:
            return message("gradients_depend_on_rows_beside", off=off), message("do_it_once_per_step")
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
        return _depends_on_rows_beside(separation)
    ratios = losses.ratios()
    if ratios and losses.is_mean(ratios):
        if 0.0 in ratios:
            reason = message("rows_that_weigh_nothing", count=ratios.count(0.0), rows=len(ratios))
            return reason, message("give_weight_0_to_ignored_rows")
        factor = max(ratios) / min(ratios)
        return message("rows_weigh_unequally", rows=len(ratios), factor=factor), message("give_weight_of_each_row")
    return message("criterion_looks_at_other_rows"), message("gather_outputs_of_all_ranks")


def _in_forward(separation: SeparationRecord, losses: _Losses) -> ReasonAndAdvice:
    """Names the mistake of a job whose criterion sees all rows: it is in the forward pass, or in what is done once a
    step."""
    if losses.output_depends_on_other_rows():
        return _depends_on_rows_beside(separation)
    if separation.moved:
        return _keeps_state(separation)
    return message("forward_returns_no_mean_over_rows"), message("compute_it_in_criterion")


def _depends_on_rows_beside(separation: SeparationRecord) -> ReasonAndAdvice:
    if separation.padded:
        return message("output_depends_on_padding"), message("mask_what_is_padded")
    reason = message("output_depends_on_rows_beside", names=separation.moved or None)
    return reason, message("compute_output_from_its_row")


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
        """Returns whether the loss of all rows is the mean of the rows' losses with these weights, and the losses of
        the halves are, too."""
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
        """Returns the weight of each row, where the paired row weighs 1, if a pair's loss is their weighted mean; [] if
        it is not, and where no row weighs anything."""
        alone, paired = self.separation.alone, self.separation.paired
        first, ratios = alone[paired], []
        if _weighs_nothing(first):
            return []
        for loss, pair in zip([*alone[:paired], *alone[paired + 1 :]], self.separation.pairs):
            if _weighs_nothing(loss) and self.same(pair, first):
                ratios.append(0.0)
                continue
            # This pair tells nothing of them; the loss of all rows does.
            if self.same(loss, first) and self.same(pair, first):
                ratios.append(1.0)
                continue
            if self.same(loss, first) or self.same(pair, loss):
                return []
            ratios.append((first - pair) / (pair - loss))
        ratios.insert(paired, 1.0)
        return ratios if all(isfinite(ratio) and ratio >= 0 for ratio in ratios) else []


def _weighs_nothing(loss: float) -> bool:
    """Returns whether a row's loss alone is that of a mean over nothing: 0 / 0, or 0 where the divisor is at least
    1."""
    return loss == 0 or not isfinite(loss)


def _mean(losses: list[float], weights: list[float]) -> float:
    total = sum(weights)
    return sum(loss * weight for loss, weight in zip(losses, weights) if weight) / total if total else float("nan")
