"""Judges the numbers that a script reports of its evaluations: whether one process that evaluates all rows reports the
same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from samestep.bounds import REPORTED_APART
from samestep.judge.evaluation import are_combined
from samestep.judge.findings import Ranks, differs
from samestep.message import Message, message
from samestep.records.call_site import CallSite
from samestep.records.findings import Finding, Question
from samestep.records.reports import ReportRecord
from samestep.records.script import NO_LOADER, ScriptRecord

QUESTION: Question = "evaluation values"
Key = tuple[tuple[tuple[str, int], ...], str, int, int]  # the lines, the call, the step, and how often before at it


@dataclass(frozen=True)
class ReportedNumber:
    """One number that a rank reports. place: its report and its place there, the same in each run of the script."""

    place: tuple[Key, int]
    rank: int
    report: ReportRecord
    found: str


def are_near(first: str, second: str) -> bool:
    """Returns whether two numbers are one, but for rounding."""
    values = float(first), float(second)
    if not all(map(math.isfinite, values)):
        return repr(values[0]) == repr(values[1])
    return abs(values[0] - values[1]) <= REPORTED_APART * max(map(abs, values)) + max(_unit(first), _unit(second))


def _unit(number: str) -> float:
    """Returns one unit of the last digit of a number; 0 of a whole number."""
    digits = number.lower().partition("e")[0].partition(".")[2]
    return float(10.0 ** -len(digits)) if digits else 0.0


@dataclass(frozen=True)
class ReportedValues:
    """The numbers that the ranks report of their evaluations, beside those of one process."""

    ranks: Ranks
    one_process: ScriptRecord
    numbers: list[ReportedNumber]
    expected: dict[tuple[Key, int], str]

    @classmethod
    def of(cls, ranks: Ranks, one_process: ScriptRecord) -> ReportedValues:
        """Pairs the reports of the ranks with those of one process: of a report that several ranks make, only where
        they report the same numbers."""
        expected = numbers_of(one_process)
        numbers = dict[tuple[Key, int], ReportedNumber]()
        by_ranks = [_reports(rank) for rank in ranks]
        apart = {
            key
            for reports in by_ranks
            for key, report in reports.items()
            if any(others[key].numbers != report.numbers for others in by_ranks if key in others)
        }
        for rank, reports in enumerate(by_ranks):
            for key, report in reports.items():
                for number, found in enumerate(report.numbers):
                    place = key, number
                    if key not in apart and place in expected:
                        numbers.setdefault(place, ReportedNumber(place, rank, report, found))
        return cls(ranks, one_process, [*numbers.values()], expected)

    def apart(self) -> list[ReportedNumber]:
        """Returns the numbers that are not those of one process."""
        return [number for number in self.numbers if not are_near(number.found, self.expected[number.place])]

    def depending(self, *, other_clock: ScriptRecord, other_evaluation: ScriptRecord) -> list[ReportedNumber]:
        """Returns the numbers that one process reports again where its clock runs faster, and otherwise where it
        evaluates with other weights. Times, and numbers of the training, are none of these."""
        same, others = numbers_of(other_clock), numbers_of(other_evaluation)
        depending = []
        for number in self.numbers:
            expected, place = self.expected[number.place], number.place
            is_same = place in same and are_near(expected, same[place])
            if is_same and place in others and not are_near(expected, others[place]):
                depending.append(number)
        return depending


def numbers_of(record: ScriptRecord) -> dict[tuple[Key, int], str]:
    """Returns the numbers that a process reports of its evaluations, by their places."""
    return {
        (key, number): found for key, report in _reports(record).items() for number, found in enumerate(report.numbers)
    }


def _reports(record: ScriptRecord) -> dict[Key, ReportRecord]:
    reports, counts = dict[Key, ReportRecord](), Counter[Key]()
    for report in record.reports:
        if report.call == "collective":
            continue
        lines = tuple((site.file.rpartition("/")[2], site.line) for site in report.sites)
        kind = lines, f"{report.call} {report.text} {len(report.numbers)}", report.step, 0
        reports[lines, kind[1], report.step, counts[kind]] = report
        counts[kind] += 1
    return reports


def own_values(ranks: Ranks) -> list[Finding]:
    """Finds values of an evaluation of which each rank has its own, where a schedule or Lightning's callbacks decide by
    them."""
    first, *others = [_reports(rank) for rank in ranks]
    for key, report in first.items():
        values = [report.numbers, *(reports[key].numbers for reports in others if key in reports)]
        if report.call not in ("plateau", "metric") or len(values) < len(ranks):
            continue
        if all(are_near(one, another) for of_rank in values for one, another in zip(values[0], of_rank)):
            continue
        shown = [number for numbers in values for number in numbers[:1]]
        cause = message("each_rank_decides_by_its_own_value", values=shown)
        if report.call == "metric":
            return [Finding(QUESTION, "warning", cause, sites=report.sites[:1])]
        finding = differs(
            QUESTION, "reported value", cause, step=report.step, rank=1, expected=shown[0], found=shown[1]
        )
        return [replace(finding, sites=report.sites[:1])]
    return []


def fed_several_times(ranks: Ranks, one_process: ScriptRecord) -> Finding | None:
    """Finds a ReduceLROnPlateau that is given each value once for each rank, as Accelerate's prepare() does."""
    counts = [
        sum(report.call == "plateau" for report in reports) for reports in (ranks[0].reports, one_process.reports)
    ]
    if len(ranks) == 1 or not counts[1] or counts[0] != len(ranks) * counts[1]:
        return None
    report = next(report for report in ranks[0].reports if report.call == "plateau")
    cause = message("plateau_advances_for_each_rank", ranks=len(ranks))
    finding = differs(
        QUESTION, "advances of the schedule", cause, step=report.step, rank=0, expected=counts[1], found=counts[0]
    )
    return replace(finding, sites=report.sites[:1])


def why_not_judged(ranks: Ranks) -> Message | None:
    """Returns why a number of an evaluation that is not one process's may yet be right; None where it may not."""
    if any(report.draws for rank in ranks for report in rank.reports):
        return message("evaluation_draws_random_numbers")
    if any(record.buffers for rank in ranks for record in rank.evaluations):
        return message("evaluation_with_running_statistics")
    return None


def judge_values(values: ReportedValues, depending: Sequence[ReportedNumber], padding: int) -> Finding:
    """Judges the numbers that depend on the evaluation. padding: how many rows are evaluated twice."""
    if not depending:
        return Finding(QUESTION, "unknown", message("no_value_depends_on_the_evaluation"))
    wrong = [number for number in values.apart() if number in depending]
    if not wrong:
        return Finding(QUESTION, "right", message("values_of_the_evaluation", numbers=len(depending)))
    number = wrong[0]
    expected, step = values.expected[number.place], number.report.step
    rows_of_ranks = set().union(*(_evaluated_rows(rank, step) for rank in values.ranks))
    if others := len(rows_of_ranks - _evaluated_rows(values.one_process, step)):
        return Finding(QUESTION, "unknown", message("one_process_evaluates_other_rows", rows=others, step=step))
    if number.report.call != "plateau" and not _are_combined(values.ranks, number.report.step):
        cause = message("value_of_one_ranks_rows", rank=number.rank, found=number.found, expected=expected)
        return Finding(QUESTION, "warning", cause, sites=number.report.sites[:1])
    cause, sites = _cause(values, number, padding)
    finding = differs(
        QUESTION,
        "reported value",
        cause,
        step=number.report.step,
        rank=number.rank,
        expected=expected,
        found=number.found,
    )
    if cause.id == "value_counts_padding":  # arises where the rows are shared out
        return finding
    return replace(finding, sites=[*dict.fromkeys([*sites, *number.report.sites[:1]])])


def _are_combined(ranks: Ranks, step: int) -> bool:
    """Returns whether the results of the ranks are reduced or gathered after the evaluation at a step."""
    records = [record for rank in ranks for record in rank.evaluations if record.step == step]
    handed_on = any(report.call == "collective" and report.step == step for rank in ranks for report in rank.reports)
    return handed_on or are_combined(records)


def _evaluated_rows(record: ScriptRecord, step: int) -> set[tuple[str, ...]]:
    """Returns the digests of the rows that a process evaluates after a number of steps."""
    rows = set[tuple[str, ...]]()
    for evaluated in record.evaluations:
        if evaluated.step == step:
            read = record.passes[evaluated.number].digests if evaluated.number != NO_LOADER else []
            rows |= {(row,) for row in evaluated.rows} | {tuple(row) for row in read if row}
    return rows


def _cause(values: ReportedValues, number: ReportedNumber, padding: int) -> tuple[Message, list[CallSite]]:
    """Returns why a number is not that of one process, and the lines where that arises, if they are known."""
    expected, ranks = float(values.expected[number.place]), len(values.ranks)
    if mean := _mean_of_ranks(values.ranks, number):
        report, of_ranks = mean
        shown = [f"{value:.6g}" for value in of_ranks]
        return message("mean_of_ranks_values", values=shown, whole=f"{expected:.6g}"), report.sites[:1]
    for factor in (ranks, 1 / ranks):
        if expected and are_near(number.found, repr(expected * factor)):
            return message("value_times_ranks", factor=factor, ranks=ranks), []
    if site := _reduced_again(values.ranks, number.report.step):
        return message("running_sum_reduced_again"), [site]
    if padding:
        return message("value_counts_padding", twice=padding), []
    return message("value_is_of_no_one_process"), []


def _handed_on(ranks: Ranks, step: int) -> list[tuple[ReportRecord, ...]]:
    """Returns the numbers that ranks hand to each other after the evaluation at a step: of each call, all ranks'."""
    by_ranks = [
        [report for report in rank.reports if report.call == "collective" and report.step == step] for rank in ranks
    ]
    return [*zip(*by_ranks)]


def _reduced_again(ranks: Ranks, step: int) -> CallSite | None:
    """Returns the line that reduces a sum in each batch, though it holds the reduced sum of the batches before; None
    where there is none."""
    calls = dict[CallSite, list[tuple[ReportRecord, ...]]]()
    for reports in _handed_on(ranks, step):
        for site in reports[0].sites[:1]:
            calls.setdefault(site, []).append(reports)
    for site, reports_of_line in calls.items():
        sums = [[float(report.numbers[0]) for report in of_call] for of_call in reports_of_line]
        grows = [min(later) >= sum(before) > 0 for before, later in pairwise(sums)]
        if len(grows) > 1 and all(grows):
            return site
    return None


def _mean_of_ranks(ranks: Ranks, number: ReportedNumber) -> tuple[ReportRecord, list[float]] | None:
    """Returns the report in which each rank hands a number to the others of which the reported number is the mean, and
    the numbers; None where there is none."""
    for reports in _handed_on(ranks, number.report.step):
        for texts in zip(*(report.numbers for report in reports)):
            of_ranks = [float(text) for text in texts]
            mean = sum(of_ranks) / len(of_ranks)
            if len({*of_ranks}) > 1 and any(are_near(number.found, repr(mean * scale)) for scale in (1.0, 100.0)):
                return reports[0], of_ranks
    return None
