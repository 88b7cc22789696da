"""Bounds are wider where the draws of noise disagree on how far rounding moves a training."""

import pytest

from samestep.proof.trace import disagreement


def test_a_loss_of_zero_has_no_least_distance() -> None:
    assert disagreement([0.0, 0.0], least=0.0) == 1
    assert disagreement([1e-16, 0.0], least=0.0) == 100


@pytest.mark.parametrize(
    ("draws", "factor"),
    [
        ([], 1),
        ([3e-9, 1e-9], 1),
        ([2e-8, 1e-9], 20),
        ([0.0, 9e-16], 1),  # roundings alone
        ([1e-3, 0.0], 100),  # a jump
    ],
)
def test_disagreement(draws: list[float], factor: float) -> None:
    assert disagreement(draws, least=2e-15) == pytest.approx(factor)
