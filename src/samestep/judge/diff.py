"""Judges whether two recordings took the same steps: before and after a change, with other versions, or after a
resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from samestep.bounds import ADDED_UP_APART, FIRST_STEP_APART
from samestep.judge.diff_gradients import gradients
from samestep.judge.diff_settings import clipping, order, precision, schedules, settings
from samestep.judge.diff_weights import averages, buffers, is_seen_by_losses, weights
from samestep.judge.findings import Ranks, common_steps, differs, digest
from samestep.judge.fit import Array, norm
from samestep.judge.matching import FROZEN, is_frozen
from samestep.judge.record_pair import RecordPair, shared_arrays
from samestep.judge.rows import trained
from samestep.judge.step_gradients import coarser_of
from samestep.message import Message, message
from samestep.proof.resumed_step import same_rates, why_other_rates, why_other_rows
from samestep.records.findings import Answer, Finding, Question
from samestep.records.script import ScriptRecord

ROWS = ("rows", "order")
BY_DRAWS = ("loss", "gradient", "clipping", "weights", "frozen weights")  # what dropout's masks change
NEEDED = ("gradient", "rows", "rate")  # without these answers nothing is the same


def compare_records(pair: RecordPair) -> list[Finding]:
    """Answers what is the same in two recordings, in the order in which a step goes. Ranks that hold other parts of the
    model are compared one by one."""
    if not pair.holds_parts:
        return _compared(pair)
    ranks = len(pair.first)
    if len(pair.second) != ranks:
        return [Finding("steps", "unknown", message("parts_on_other_ranks", first=ranks, second=len(pair.second)))]
    answers: dict[Question, list[Finding]] = {}
    for number in range(ranks):
        # A later stage of a pipeline is given the output of the stage before it, and no rows.
        is_later = pair.first[0].start.keys().isdisjoint(pair.first[number].start)
        for finding in _compared(pair.of_rank(number)):
            if not (is_later and finding.question in ROWS):
                answers.setdefault(finding.question, []).append(_of_rank(finding, number, ranks))
    return [_gravest(findings) for findings in answers.values()]


def _of_rank(finding: Finding, rank: int, ranks: int) -> Finding:
    """Returns the finding about one of several ranks."""
    if finding.divergence:
        return replace(finding, divergence=replace(finding.divergence, rank=rank))
    if finding.answer == "right":
        return replace(finding, message=message("each_part_answers", ranks=ranks, answer=finding.message))
    return replace(finding, message=message("part_answers", rank=rank, answer=finding.message))


def _gravest(findings: Sequence[Finding]) -> Finding:
    """Returns the first finding that differs; without one the first unknown one, else one that is right."""
    different = [(finding.divergence.order, number) for number, finding in enumerate(findings) if finding.divergence]
    if different:
        return findings[min(different)[1]]
    return next((finding for finding in findings if finding.answer != "right"), findings[0])


def _compared(pair: RecordPair) -> list[Finding]:
    pair = pair.with_matched_names()
    if not pair.steps:
        return [Finding("steps", "unknown", message("record_without_steps"))]
    shorter = None if pair.ends_together else message("as_many_as_both_have")
    compared = message("steps_are_compared", steps=pair.steps, shorter=shorter, since=pair.resumed_since)
    steps = Finding("steps", "right", compared)
    if pair.since:
        return [steps, _start(pair), _rows(pair), *gradients(pair), _resumed_rates(pair), _resumed_weights(pair)]
    of_steps, of_averages = gradients(pair), averages(pair)
    of_teachers = [finding for finding in of_averages if is_seen_by_losses(finding, pair)]
    findings = [
        steps,
        *precision(pair),
        _start(pair),
        *(finding for finding in of_steps if finding.question == "micro-batches"),
        _rows(pair),
        *of_teachers,
        *(finding for finding in of_steps if finding.question != "micro-batches"),
        *clipping(pair),
        *settings(pair),
        weights(pair),
        *(finding for finding in of_averages if finding not in of_teachers),
        *buffers(pair),
        *schedules(pair),
        *order(pair),
    ]
    return [_unless_drawn(finding, pair) for finding in findings]


def _unless_drawn(finding: Finding, pair: RecordPair) -> Finding:
    """Returns a finding; an unknown one where the difference follows from random numbers, of which each rank draws its
    own."""
    step = finding.divergence.step if finding.divergence else None
    if step is None or finding.question not in BY_DRAWS or not pair.draws_by_rank(step):
        return finding
    return Finding(finding.question, "unknown", message("each_rank_draws_its_own", step=step))


def answer_of(findings: Sequence[Finding]) -> Answer:
    """Returns the answer of a comparison: whether the second took the steps of the first."""
    if any(finding.answer == "differs" for finding in findings):
        return "differs"
    right = {finding.question for finding in findings if finding.answer == "right"}
    return "right" if right.issuperset(NEEDED) else "unknown"


def _start(pair: RecordPair) -> Finding:
    question: Question = "initial weights"
    first, second = pair.first[0], pair.second[0]
    if pair.sharded and not pair.since:
        return _sharded_start(pair)
    if not first.start or not second.start:
        return Finding(question, "unknown", message("records_without_whole_weights"))
    if apart := [
        (name, second_name) for second_name, name in pair.names.items() if is_frozen(name) != is_frozen(second_name)
    ]:
        name, second_name = apart[0]
        cause = message("trained_in_one_alone", parameters=len(apart))
        states = [message("is_frozen" if is_frozen(parameter) else "is_trained") for parameter in (name, second_name)]
        tensor = name.removesuffix(FROZEN)
        return differs(question, "parameters", cause, tensor=tensor, expected=states[0], found=states[1])
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
    parameters, renamed = len(first.start), sum(name != second_name for name, second_name in pair.names.items())
    if renamed:
        return Finding(question, "right", message("starts_the_same_renamed", parameters=parameters, renamed=renamed))
    said = message("second_starts_the_same", parameters=parameters, since=pair.resumed_since)
    return Finding(question, "right", said)


def _sharded_start(pair: RecordPair) -> Finding:
    """Compares the first weights of parameters of which each rank has recorded its part: by their sums."""
    question: Question = "initial weights"
    first, second = pair.weights(0, before=True)
    if not first or not second:
        return Finding(question, "unknown", message("records_without_whole_weights"))
    if names := sorted(first.keys() ^ second.keys()):
        cause = message("models_have_other_parameters", names=names)
        return differs(question, "parameters", cause, tensor=names[0], expected=len(first), found=len(second))
    shared = shared_arrays(first, second)
    different = [name for name in first if name not in shared or _is_apart(first[name], second[name])]
    if different:
        cause = message("initial_weights_differ", different=len(different), parameters=len(first))
        expected, found = (message("a_norm", norm=norm(arrays[different[0]])) for arrays in (first, second))
        return differs(question, "initial weights", cause, tensor=different[0], expected=expected, found=found)
    return Finding(question, "right", message("sharded_start_is_close", parameters=len(first)))


def _is_apart(first: Array, second: Array) -> bool:
    """Returns whether sums of weights differ by more than the order in which they were added up."""
    return norm(first - second) > ADDED_UP_APART * norm(first)


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
    """Judges whether all ranks together train with the same rows at each step."""
    moved = False
    if _held_otherwise(pair):
        return Finding("rows", "right", message("rows_held_otherwise"))
    for number in range(pair.steps):
        step = pair.since + number
        first, second = _rows_of_step(pair.first, step), _rows_of_step(pair.second, number)
        missing = _counted(first) - _counted(second)
        rows, rows_of_second = sum(map(len, first)), sum(map(len, second))
        if missing or rows != rows_of_second:
            count = sum(missing.values())
            cause = message("rows_not_in_the_second", missing=count, rows=rows)
            extra = _counted(second) - _counted(first)
            if pair.since:
                cause = _why_other_rows(pair.first, step, second)
            elif pair.on_other_ranks:
                cause = _why_by_ranks(pair, rows, rows_of_second)
            return differs(
                "rows",
                "rows of all ranks",
                cause,
                step=step,
                rank=_reader(missing, first) if missing else _reader(extra, second),
                expected=message("rows_of_all_ranks", rows=rows),
                found=message("rows_of_which_expected", rows=rows_of_second, expected=rows - count),
            )
        moved |= first != second
    said = message("rows_spread_otherwise") if moved else message("rows_on_the_same_ranks")
    return Finding("rows", "right", said)


def _reader(rows: Counter[str], of_ranks: Sequence[Sequence[str]]) -> int | None:
    """Returns the first rank that reads one of some rows."""
    return next((rank for rank, of_rank in enumerate(of_ranks) if rows.keys() & {*of_rank}), None)


def _why_by_ranks(pair: RecordPair, rows: int, rows_of_second: int) -> Message:
    """Returns why another number of ranks trains other rows in a step."""
    ranks = len(pair.first), len(pair.second)
    if rows * ranks[1] == rows_of_second * ranks[0]:
        return message(
            "batch_grows_with_ranks", rows=rows, first=ranks[0], rows_of_second=rows_of_second, second=ranks[1]
        )
    return message("rows_go_by_ranks", first=ranks[0], second=ranks[1])


def _held_otherwise(pair: RecordPair) -> bool:
    """Returns whether no row of the first step has the same bits in both, and still gives the same gradient: as of
    another dtype, or scaled in another place. Then the rows of each step are judged by the gradients alone."""
    first, second = (_counted(_rows_of_step(ranks, 0)) for ranks in (pair.first, pair.second))
    distance = pair.distances[0]
    if pair.since or not first or not second or first & second or distance is None:
        return False
    return distance <= FIRST_STEP_APART * coarser_of(pair.first)


def _why_other_rows(first: Ranks, step: int, read: Sequence[Sequence[str]]) -> Message:
    """Returns why a resumed run reads other rows than the uninterrupted run in its step. read: of each rank."""
    wanted, steps = _counted(read), common_steps(first)
    same = [number for number in steps if wanted and _counted(_rows_of_step(first, number)) == wanted]
    return why_other_rows(step, same, {number: _epoch(first[0], number) for number in steps})


def _epoch(rank: ScriptRecord, step: int) -> int | None:
    """Returns the number of the pass over the loader from which a step has its rows; None where there is none."""
    numbers = {id(record): number for number, record in enumerate(trained(rank))}
    passes = [number for micro_batch in rank.steps[step].micro_batches for number in micro_batch.passes]
    return numbers.get(id(rank.passes[passes[0]])) if passes else None


def _resumed_rates(pair: RecordPair) -> Finding:
    for number in range(pair.steps):
        step = pair.since + number
        first, second = (record.rates for record in pair.steps_of_rank_0(number))
        if not same_rates(first, second):
            cause = why_other_rates(step, second, [record.rates for record in pair.first[0].steps])
            return differs("rate", "learning rate", cause, step=step, rank=0, expected=first, found=second)
    return Finding("rate", "right", message("rates_are_the_same_in_both"))


def _resumed_weights(pair: RecordPair) -> Finding:
    first, second = pair.steps_of_rank_0(0)
    if first.weights != second.weights and (name := _moved_otherwise(pair)):
        expected, found = (digest(record.weights[name]) for record in (first, second))
        cause = message("optimizer_state_not_restored")
        what = "weights after the step"
        return differs("weights", what, cause, step=pair.since, tensor=name, expected=expected, found=found)
    return weights(pair)


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
