"""Whether two recordings took the same steps: before and after a change, with other versions, or after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from samestep.errors import TrainingFailed
from samestep.message import Message, message
from samestep.proof.script.findings import Ranks, common_steps, differs, digest
from samestep.proof.script.replay import FIRST, LATER, WEIGHTS, coarser_of, same_rates
from samestep.proof.script.rows import trained
from samestep.proof.script.step_gradients import Array, arrays_of_ranks, norm, norm_of_all, whole_gradients
from samestep.records.record import Record
from samestep.records.script import END, START, TAKEN, Answer, Finding, Question, ScriptRecord, StepRecord

NEEDED = ("gradient", "rows", "rate")  # without these answers nothing is the same


@dataclass(frozen=True)
class RecordPair:
    """Two recordings, and their folders. since: the step of the first with which the second begins."""

    first: Ranks
    second: Ranks
    first_record: Record
    second_record: Record
    since: int = 0

    @property
    def steps(self) -> int:
        """How many steps can be compared: those that every rank of both has taken."""
        return max(0, min(len(common_steps(self.first)) - self.since, len(common_steps(self.second))))

    @property
    def ends_together(self) -> bool:
        """Whether no rank has taken a step that is not compared."""
        ahead = (len(rank.steps) - self.since > self.steps for rank in self.first)
        return not any(ahead) and all(len(rank.steps) == self.steps for rank in self.second)

    @property
    def resumed_since(self) -> int | None:
        """The step with which a resumed run begins; None where the second is not one."""
        return self.since or None

    def steps_of_rank_0(self, number: int) -> tuple[StepRecord, StepRecord]:
        """Returns the second's step `number` after the first's step beside it."""
        return self.first[0].steps[self.since + number], self.second[0].steps[number]

    def taken(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the gradients that the optimizers took in these steps."""
        first = _taken(self.first, self.first_record, self.since + number)
        return first, _taken(self.second, self.second_record, number)


def compare_records(pair: RecordPair) -> list[Finding]:
    """Answers what is the same in two recordings, in the order in which a step goes."""
    if not pair.steps:
        return [Finding("steps", "unknown", message("record_without_steps"))]
    shorter = None if pair.ends_together else message("as_many_as_both_have")
    compared = message("steps_are_compared", steps=pair.steps, shorter=shorter, since=pair.resumed_since)
    return [
        Finding("steps", "right", compared),
        _start(pair),
        _rows(pair),
        _gradients(pair),
        _rates(pair),
        _weights(pair),
    ]


def answer_of(findings: Sequence[Finding]) -> Answer:
    """Returns the answer of a comparison: whether the second took the steps of the first."""
    if any(finding.answer == "differs" for finding in findings):
        return "differs"
    right = {finding.question for finding in findings if finding.answer == "right"}
    return "right" if right.issuperset(NEEDED) else "unknown"


def _taken(ranks: Ranks, record: Record, step: int) -> dict[str, Array]:
    shards = ranks[0].steps[step].shards
    return whole_gradients(arrays_of_ranks(record, ranks if shards else ranks[:1], step), TAKEN, shards)[0]


def _start(pair: RecordPair) -> Finding:
    question: Question = "initial weights"
    first, second = pair.first[0], pair.second[0]
    if not first.start or not second.start:
        return Finding(question, "unknown", message("records_without_whole_weights"))
    if names := sorted(first.start.keys() ^ second.start.keys()):
        cause = message("models_have_other_parameters", names=names)
        counts = len(first.start), len(second.start)
        return differs(question, "parameters", cause, tensor=names[0], expected=counts[0], found=counts[1])
    wanted = _weights_before(first, pair.since)
    different = [name for name in wanted if wanted[name] != second.start[name]]
    if different:
        cause = message("initial_weights_differ", different=len(different), parameters=len(first.start))
        if pair.since:
            cause = _why_other_weights(first, second, pair.since, different)
        name = different[0]
        expected, found = digest(wanted[name]), digest(second.start[name])
        return differs(question, "initial weights", cause, tensor=name, expected=expected, found=found)
    said = message("second_starts_the_same", parameters=len(first.start), since=pair.resumed_since)
    return Finding(question, "right", said)


def _weights_before(rank: ScriptRecord, step: int) -> Mapping[str, int]:
    """Returns the digest of each weight before a step; of those that the optimizer does not hold, the first one."""
    return {**rank.start, **rank.steps[step - 1].weights} if step else rank.start


def _why_other_weights(first: ScriptRecord, second: ScriptRecord, since: int, different: Sequence[str]) -> Message:
    """Returns why a resumed run begins with other weights. different: the names of these."""
    for step in range(len(first.steps) + 1):
        weights = _weights_before(first, step)
        if all(weights.get(name) == second.start[name] for name in different):
            if not step:
                return message("no_checkpoint_was_loaded")
            return message("weights_of_another_step", step=step - 1, expected=since - 1)
    return message("weights_not_restored", different=len(different), parameters=len(first.start), steps=since)


def _rows_of_step(ranks: Ranks, step: int) -> list[list[str]]:
    """Returns the digests of the rows that each rank trains in a step."""
    return [[row for micro_batch in rank.steps[step].micro_batches for row in micro_batch.rows] for rank in ranks]


def _counted(rows: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(row for of_rank in rows for row in of_rank)


def _rows(pair: RecordPair) -> Finding:
    """Whether all ranks together train with the same rows at each step."""
    moved = False
    for number in range(pair.steps):
        step = pair.since + number
        first, second = _rows_of_step(pair.first, step), _rows_of_step(pair.second, number)
        missing = _counted(first) - _counted(second)
        rows, rows_of_second = sum(map(len, first)), sum(map(len, second))
        if missing or rows != rows_of_second:
            count = sum(missing.values())
            cause = message("rows_not_in_the_second", missing=count, rows=rows)
            if pair.since:
                cause = _why_other_rows(pair.first, step, second)
            return differs(
                "rows",
                "rows of all ranks",
                cause,
                step=step,
                rank=next((rank for rank, of_rank in enumerate(first) if missing.keys() & {*of_rank}), None),
                expected=message("rows_of_all_ranks", rows=rows),
                found=message("rows_of_which_expected", rows=rows_of_second, expected=rows - count),
            )
        moved |= first != second
    said = message("rows_spread_otherwise") if moved else message("rows_on_the_same_ranks")
    return Finding("rows", "right", said)


def _why_other_rows(first: Ranks, step: int, read: Sequence[Sequence[str]]) -> Message:
    """Returns why a resumed run reads other rows than the uninterrupted run in its step. read: of each rank."""
    wanted, steps = _counted(read), common_steps(first)
    same = [number for number in steps if _counted(_rows_of_step(first, number)) == wanted]
    if not wanted or not same:
        return message("epochs_order_not_restored")
    if step - 1 in same:
        return message("batch_trained_again", step=step - 1)
    if step + 1 in same:
        return message("batch_read_too_early", step=step + 1)
    epochs = [_epoch(first[0], number) for number in steps]
    epoch, found = epochs[step], epochs[same[0]]
    if epoch is not None and epochs.index(epoch) in same:
        return message("epoch_begins_anew", epoch=epoch)
    if found is not None and epoch is not None and found != epoch:
        return message("order_of_another_epoch", step=same[0], found=found, expected=epoch)
    return message("place_in_the_data_not_restored", step=same[0])


def _epoch(rank: ScriptRecord, step: int) -> int | None:
    """Returns the number of the pass over the loader from which a step has its rows; None where there is none."""
    numbers = {id(record): number for number, record in enumerate(trained(rank))}
    passes = [number for micro_batch in rank.steps[step].micro_batches for number in micro_batch.passes]
    return numbers.get(id(rank.passes[passes[0]])) if passes else None


def _gradients(pair: RecordPair) -> Finding:
    question: Question = "gradient"
    worst, at_first = 0.0, 0.0
    coarser, compared = coarser_of(pair.first), 0
    for number in range(pair.steps):
        step = pair.since + number
        first, second = pair.taken(number)
        names = [name for name in first if name in second and first[name].shape == second[name].shape]
        if not names or len(names) < max(len(first), len(second)):
            continue
        if any(not np.isfinite(gradients[name]).all() for gradients in (first, second) for name in names):
            return Finding(question, "unknown", message("compared_gradient_not_finite", step=step))
        compared += 1
        size = norm_of_all(first, names) or 1.0
        off = {name: norm(first[name] - second[name]) for name in names}
        name = max(off, key=lambda parameter: off[parameter])
        worst = max(worst, off[name] / size)
        at_first = at_first if number else worst
        if off[name] <= (LATER if number else FIRST) * coarser * size:
            continue
        cause = message("random_state_not_restored") if pair.since else message("same_weights_other_gradient")
        if number:
            cause = message("other_gradient_after_close_weights")
        expected, found = (message("a_norm", norm=norm(gradients[name])) for gradients in (first, second))
        return differs(question, "gradient", cause, step=step, tensor=name, expected=expected, found=found)
    if not compared:
        return Finding(question, "unknown", message("no_step_has_all_gradients"))
    if not worst:
        return Finding(question, "right", message("gradients_bitwise_the_same"))
    return Finding(question, "right", message("gradients_are_close", first=at_first, worst=worst))


def _rates(pair: RecordPair) -> Finding:
    for number in range(pair.steps):
        step = pair.since + number
        first, second = (record.rates for record in pair.steps_of_rank_0(number))
        if not same_rates(first, second):
            cause = message("steps_use_other_rates")
            if pair.since:
                cause = _why_other_rates(pair.first[0], step, second)
            return differs("rate", "learning rate", cause, step=step, rank=0, expected=first, found=second)
    return Finding("rate", "right", message("rates_are_the_same_in_both"))


def _why_other_rates(first: ScriptRecord, step: int, resumed_rates: Sequence[float]) -> Message:
    """Returns why a resumed run has other rates than the uninterrupted run in its step."""
    rates = [record.rates for record in first.steps]
    if step + 1 < len(rates) and same_rates(rates[step + 1], resumed_rates):
        return message("schedule_one_step_ahead")
    if same_rates(rates[step - 1], resumed_rates):
        return message("schedule_one_step_behind")
    if same_rates(rates[0], resumed_rates):
        return message("rate_begins_anew")
    return message("schedule_not_restored")


def _weights(pair: RecordPair) -> Finding:
    question: Question = "weights"
    steps = [pair.steps_of_rank_0(number) for number in range(pair.steps)]
    apart = next((number for number, (first, second) in enumerate(steps) if first.weights != second.weights), None)
    if apart is None and steps[0][0].weights:
        return Finding(question, "right", message("weights_bitwise_the_same", steps=pair.steps))
    if pair.since and apart == 0 and (name := _moved_otherwise(pair)):
        expected, found = (digest(record.weights[name]) for record in steps[0])
        cause = message("optimizer_state_not_restored")
        what = "weights after the step"
        return differs(question, what, cause, step=pair.since, tensor=name, expected=expected, found=found)
    if not pair.ends_together:
        said = message("records_end_apart_without_weights")
        if apart is not None:
            said = message("records_end_apart", step=pair.since + apart)
        return Finding(question, "unknown", said)
    try:
        start = pair.second_record.arrays(START)
        first, second = (record.arrays(END) for record in (pair.first_record, pair.second_record))
    except TrainingFailed:
        return Finding(question, "unknown", message("weights_not_kept"))
    names = [name for name in first if name in second and name in start and first[name].shape == second[name].shape]
    moved = norm_of_all({name: first[name].astype(float) - start[name] for name in names}, names)
    if not names or not moved:
        return Finding(question, "unknown", message("no_common_weight_moves"))
    off = {name: first[name].astype(float) - second[name] for name in names}
    distance, bound = norm_of_all(off, names) / moved, WEIGHTS * coarser_of(pair.first)
    if not distance <= bound:
        return differs(
            question,
            "weights",
            message("final_weights_differ"),
            step=pair.since + pair.steps - 1,
            tensor=max(names, key=lambda name: norm(off[name])),
            expected=message("at_most_of_the_movement", bound=bound),
            found=round(distance, 6),
        )
    return Finding(question, "right", message("final_weights_are_close", steps=pair.steps, distance=distance))


def _moved_otherwise(pair: RecordPair) -> str:
    """Returns a parameter that the first step moves otherwise, from the same bits of weights and gradients, and at the
    same rates; '' where there is none, or these are not the same."""
    wanted = _weights_before(pair.first[0], pair.since)
    (first, second), (first_taken, second_taken) = pair.steps_of_rank_0(0), pair.taken(0)
    if not wanted or wanted != pair.second[0].start or not same_rates(first.rates, second.rates):
        return ""
    if first_taken.keys() != second_taken.keys():
        return ""
    if any(not np.array_equal(first_taken[name], second_taken[name]) for name in first_taken):
        return ""
    shared = [name for name in first.weights if name in second.weights]
    return next((name for name in shared if first.weights[name] != second.weights[name]), "")
