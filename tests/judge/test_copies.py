"""The copies of a parameter that ranks hold are compared by one function, whatever the ranks are to each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from samestep.judge.copies import Copies, copies_apart, copies_drift_apart
from samestep.message import message
from samestep.report.check import QUANTITIES


def _ranks(*digests: list[int]) -> Any:
    """Ranks that have these digests of `weight`: as they begin, and after each step."""
    return [
        SimpleNamespace(
            start={"weight": of_rank[0]}, steps=[SimpleNamespace(weights={"weight": value}) for value in of_rank[1:]]
        )
        for of_rank in digests
    ]


WEIGHT = [Copies("weight", [(0, "weight"), (1, "weight"), (2, "weight")])]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_is_named_has_what_most_have_not(rank: int) -> None:
    begun = [[7], [7], [7]]
    begun[rank] = [8]
    apart = copies_apart(WEIGHT, _ranks(*begun), step=None)
    assert apart and (apart.rank, apart.different) == (rank, 1)
    divergence = apart.finding(message("rates_are_the_same")).divergence
    assert divergence and (divergence.quantity, divergence.found[rank]) == ("initial weights", "8")


def test_the_first_step_is_told_after_which_copies_differ() -> None:
    assert copies_drift_apart(WEIGHT, _ranks([1, 7, 7], [2, 7, 7], [3, 7, 7])) is None
    apart = copies_drift_apart(WEIGHT, _ranks([1, 7, 7], [1, 7, 8], [1, 7, 9]))
    assert apart and apart.step == 1
    told, told_along = (apart.finding(message("rates_are_the_same"), along=axis).divergence for axis in (None, "data"))
    assert told and told_along
    assert QUANTITIES[told.quantity].id == "quantity_weights_after_the_step"
    assert told_along.quantity == f"{told.quantity} along data"
