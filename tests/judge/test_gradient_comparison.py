"""Gradients that ranks have, beside those that they are to have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from said import says
from samestep.judge.gradient_comparison import GradientComparison


def compared(one_process: dict[str, Any], held: dict[str, Any]) -> GradientComparison:
    arrays = [{name: np.array(value, dtype=float) for name, value in given.items()} for given in (held, one_process)]
    found, wanted = ({0: of_rank} for of_rank in arrays)
    return GradientComparison.without_zeros(found, wanted, 1e-3, rounding=1e-7)


def test_rounding_of_zero_is_not_compared_and_a_small_gradient_is() -> None:
    assert compared({"a": [1.0], "b": [1e-9]}, {"a": [1.0], "b": [3e-9]}).apart == []
    assert compared({"a": [1.0], "b": [1e-3]}, {"a": [1.0], "b": [3e-3]}).apart == [(0, "b")]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_makes_no_other_one_right(broken: float) -> None:
    in_one_process = compared({"a": [1.0], "b": [broken]}, {"a": [2.0], "b": [1.0]})
    assert (0, "a") in in_one_process.apart
    says(in_one_process.not_finite(3), "replayed_gradient_not_finite", parameter="b", step=3)
    of_rank = compared({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [broken]}).not_finite(0)
    assert of_rank is not None and of_rank.id == "gradient_of_rank_not_finite"
    assert compared({"a": [1.0]}, {"a": [1.0]}).not_finite(0) is None
