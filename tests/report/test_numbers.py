"""How the terminal, the figures and the page write numbers."""

from __future__ import annotations

import pytest

from samestep.records.results import StepTime, Summary
from samestep.report import numbers

WIDE = Summary(median=200.0, low=190.0, high=230.0, n=5)
ONE = Summary(median=200.0, low=200.0, high=200.0, n=1)


@pytest.mark.parametrize(
    ("value", "text"), [(5210.4, "5,210"), (100.0, "100"), (99.96, "100"), (3.4189, "3.42"), (0.0, "0"), (None, "–")]
)
def test_an_amount_has_three_digits_or_all_before_the_point(value: float | None, text: str) -> None:
    assert numbers.amount(value) == text


def test_only_no_difference_is_0() -> None:
    assert [numbers.difference(value) for value in (0.0, 2.2e-16, 1e-300, None)] == ["0", "2.2e-16", "1.0e-300", "–"]


def test_the_spread_is_half_the_interval_as_a_share_of_the_median() -> None:
    assert numbers.spread(WIDE) == "10 %"
    assert numbers.spread(ONE) == numbers.spread(None) == "–"


def test_an_interval_and_its_n() -> None:
    assert numbers.interval(WIDE, numbers.amount) == "190–230"
    assert numbers.interval_and_n(WIDE, numbers.amount) == "190–230, n=5"
    assert numbers.interval_and_n(ONE, numbers.amount) == "n=1"
    assert numbers.median(WIDE, numbers.factor) == "200.00"


def test_the_wait_comes_before_the_step() -> None:
    assert numbers.wait_and_step(StepTime(wait=0.12, step=41.3)) == "0.12 / 41.3"
