"""Medians, intervals and paired ratios."""

from __future__ import annotations

from samestep.report.figures.stats import ratios, summary


def test_summary() -> None:
    found = summary([10.0, 12.0, 11.0, 30.0, 9.0])
    assert (found["median"], found["n"]) == (11.0, 5)
    assert 9.0 <= found["low"] <= 11.0 <= found["high"] <= 30.0


def test_one_launch_has_no_spread() -> None:
    assert summary([5.0]) == {"median": 5.0, "low": 5.0, "high": 5.0, "n": 1}


def test_ratios_are_paired() -> None:
    """The machine is twice as slow in the second round: pairs do not see it, unpaired medians would."""
    found = ratios([20.0, 10.0, 20.0], [10.0, 5.0, 10.0])
    assert (found["median"], found["low"], found["high"]) == (2.0, 2.0, 2.0)
