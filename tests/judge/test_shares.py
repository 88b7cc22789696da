"""How much each rank's own gradient weighs in another gradient, on made-up gradients. It needs no torch."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.judge.step_gradients import Array, StepGradients

OWN = np.random.default_rng(0).normal(size=(2, 2, 400))  # [rank, micro-batch]
OTHER = np.random.default_rng(1).normal(size=400)


def shares_in(weights: list[list[float]], other: float = 0.0, close: float = 1e-5) -> tuple[int, list[float]] | None:
    """Returns the shares in the mean of the ranks' gradients with weights, [rank][micro-batch], and a part of OTHER."""
    mean: Array = OWN.sum((0, 1)) / 2
    wanted: Array = np.einsum("rm,rmn->n", np.array(weights), OWN) / 2
    wanted = wanted + other * OTHER * np.linalg.norm(wanted) / np.linalg.norm(OTHER)
    return StepGradients(
        names=["a"],
        local=[{"a": [*of_rank]} for of_rank in OWN],
        reduced=[{"a": mean}] * 2,
        taken=[{"a": mean}] * 2,
        micro_batches=2,
        close=close,
        clipped=False,
        factor=0.5,
    ).shares_in({"a": wanted})


def test_the_shares_are_those_of_the_micro_batch_that_is_the_farthest_from_even() -> None:
    found = shares_in([[0.9, 0.5], [1.1, 1.5]])
    assert found and found[0] == 1
    assert found[1] == pytest.approx([0.25, 0.75])


def test_even_weights_explain_nothing() -> None:
    assert shares_in([[1.002, 1.002], [1.002, 1.002]]) is None
    assert shares_in([[1.0, 1.002], [1.0, 0.998]]) is not None


@pytest.mark.parametrize(
    ("uneven", "other", "is_explained"),
    [(0.3, 0.0, True), (0.3, 0.01, True), (0.3, 0.1, False), (0.02, 0.03, False)],
)
def test_what_bfloat16_leaves_is_a_part_of_the_difference(uneven: float, other: float, is_explained: bool) -> None:
    weights = [[1 - uneven, 1.0], [1 + uneven, 1.0]]
    assert (shares_in(weights, other, close=3e-2) is not None) == is_explained
