"""Medians, bootstrap intervals and paired ratios."""

from __future__ import annotations

from bisect import bisect_right
from math import comb

import pytest

from samestep.records.results import Summary
from samestep.report.figures.speed import ratios, summary

VALUES = [float(k**3) for k in range(501)]  # skewed: a symmetric interval, or one around the mean, is wrong here


def test_summary_of_few_launches_reaches_from_the_smallest_to_the_largest() -> None:
    """Of five values, one resampled median in 17 is the smallest: more than the 2.5 % that the interval leaves out."""
    assert summary([10.0, 12.0, 11.0, 30.0, 9.0]) == Summary(median=11.0, low=9.0, high=30.0, n=5)


def test_the_interval_leaves_out_a_fortieth_of_the_resampled_medians_on_each_side() -> None:
    found = summary(VALUES)
    assert (found.median, found.n) == (250.0**3, 501)
    # Three standard errors of a share of 2.5 % in 2,000 resamples.
    assert share_of_resampled_medians_up_to(found.low) == pytest.approx(0.025, abs=0.0105)
    assert share_of_resampled_medians_up_to(found.high) == pytest.approx(0.975, abs=0.0105)


def share_of_resampled_medians_up_to(value: float) -> float:
    """The exact chance that the median of n values, drawn from VALUES with replacement, is not above `value`.

    The median is not above it where more than half of the draws are not: a binomial distribution.
    """
    n, not_above = len(VALUES), bisect_right(VALUES, value)
    ways = sum(comb(n, k) * not_above**k * (n - not_above) ** (n - k) for k in range(n // 2 + 1, n + 1))
    return ways / n**n


def test_the_interval_is_the_same_every_time() -> None:
    assert summary(VALUES) == summary(VALUES)


def test_one_launch_has_no_spread() -> None:
    assert summary([5.0]) == Summary(median=5.0, low=5.0, high=5.0, n=1)


def test_ratios_are_paired() -> None:
    """The machine is twice as slow in the second round and twice as fast in the third; each pair has the same ratio."""
    assert ratios([20.0, 10.0, 40.0], [10.0, 5.0, 20.0]) == Summary(median=2.0, low=2.0, high=2.0, n=3)
