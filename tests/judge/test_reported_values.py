"""Which reported numbers are compared with one process's, and what a number that differs is told to be."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.judge.reported_values import ReportedValues, are_near, fed_several_times, judge_values, own_values
from samestep.records.call_site import CallSite
from samestep.records.reports import NUMBER, ReportCall, ReportRecord

LINE, REDUCED = 30, 20


def report(numbers: str, call: ReportCall = "print", line: int = LINE, step: int = 4) -> ReportRecord:
    return ReportRecord(call, [CallSite("/train.py", line)], step, "digest", numbers.split())


def rank(*reports: ReportRecord) -> Any:
    return SimpleNamespace(reports=[*reports], evaluations=[])


def judged(ranks: Sequence[Any], expected: str, padding: int = 0) -> Any:
    one_process = rank(report(expected))
    values = ReportedValues.of(ranks, one_process)
    other = rank(report(" ".join(["0.9"] * len(expected.split()))))
    return judge_values(values, values.depending(other_clock=one_process, other_evaluation=other), padding)


def test_numbers_that_stand_in_words_are_none() -> None:
    assert NUMBER.findall("epoch 3 of resnet50: 81.5% (-1e-3), nan, v2.1, 7") == ["3", "81.5", "-1e-3", "nan", "7"]


@pytest.mark.parametrize(
    ("first", "second", "near"),
    [
        ("0.61", "0.62", True),
        ("0.6100", "0.6120", False),
        ("32", "33", False),
        ("nan", "nan", True),
        ("nan", "1", False),
    ],
)
def test_near_is_within_one_unit_of_the_last_digit(first: str, second: str, near: bool) -> None:
    assert are_near(first, second) == near


def test_the_mean_of_what_ranks_handed_on_is_named_with_both_lines() -> None:
    ranks = [
        rank(report("0.7", "collective", REDUCED), report("0.6278")),
        rank(report("0.5556", "collective", REDUCED)),
    ]
    found = judged(ranks, "0.5992")
    assert (found.answer, found.message.id) == ("differs", "mean_of_ranks_values")
    assert [site.line for site in found.sites] == [REDUCED, LINE]


def test_a_sum_that_holds_the_reduced_one_before_is_named() -> None:
    handed_on = [("2", "3"), ("6", "7"), ("15", "14")]
    ranks = [
        rank(*(report(numbers[number], "collective", REDUCED) for numbers in handed_on), report("0.71"))
        for number in range(2)
    ]
    assert judged(ranks, "0.5992").message.id == "running_sum_reduced_again"


@pytest.mark.parametrize(
    ("found", "padding", "kind"),
    [("1.1984", 0, "value_times_ranks"), ("0.7", 2, "value_counts_padding"), ("0.7", 0, "value_is_of_no_one_process")],
)
def test_other_causes(found: str, padding: int, kind: str) -> None:
    ranks = [rank(report("5", "collective", REDUCED), report(found)), rank(report("7", "collective", REDUCED))]
    assert judged(ranks, "0.5992", padding).message.id == kind


def test_one_ranks_own_value_is_a_warning() -> None:
    found = judged([rank(report("0.7")), rank()], "0.5992")
    assert (found.answer, found.message.id) == ("warning", "value_of_one_ranks_rows")


def test_a_time_is_no_value_of_the_evaluation() -> None:
    ranks = [rank(report("0.5992 12.5")), rank()]
    values = ReportedValues.of(ranks, rank(report("0.5992 3.5")))
    other_clock, other_evaluation = rank(report("0.5992 3500.0")), rank(report("0.4 3.9"))
    depending = values.depending(other_clock=other_clock, other_evaluation=other_evaluation)
    assert [number.found for number in depending] == ["0.5992"]
    assert judge_values(values, depending, 0).answer == "right"


def test_what_each_rank_reports_of_its_own_is_not_judged() -> None:
    ranks = [rank(report("0.7")), rank(report("0.5"))]
    assert not ReportedValues.of(ranks, rank(report("0.6"))).numbers


def test_own_values_that_decide_are_named_and_printed_ones_are_not() -> None:
    kinds: tuple[ReportCall, ...] = ("plateau", "metric", "print")
    found = [own_values([rank(report(number, kind)) for number in ("0.5", "0.7")]) for kind in kinds]
    assert [[finding.answer for finding in findings] for findings in found] == [["differs"], ["warning"], []]
    assert not own_values([rank(report("0.5", "plateau")), rank(report("0.5", "plateau"))])


def test_a_plateau_that_is_fed_once_for_each_rank_is_named() -> None:
    once, twice = rank(report("0.5", "plateau")), rank(*[report("0.5", "plateau")] * 2)
    finding = fed_several_times([twice, twice], once)
    assert finding and finding.message.id == "plateau_advances_for_each_rank"
    assert fed_several_times([once, once], once) is None
