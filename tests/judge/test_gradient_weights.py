"""What ranks' own gradients weigh in the gradients that they step with, on made-up gradients. It needs no torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.judge.fit import fit, multiple_of
from samestep.judge.gradient_weights import GradientWeights
from samestep.judge.step_gradients import StepGradients

RANKS, MICRO_BATCHES = 3, 2
OWN = np.random.default_rng(0).normal(size=(RANKS, MICRO_BATCHES, 400))


def gradients(weights: Any, own: Any = OWN, noise: float = 0.0) -> StepGradients:
    """The step of ranks whose own gradients weigh so much. weights: of shape [rank that steps, rank, micro-batch]."""
    reduced = np.einsum("srm,rmn->sn", np.array(weights, dtype=float), own)
    reduced = reduced + noise * np.random.default_rng(1).normal(size=reduced.shape)
    return StepGradients(
        names=["a"],
        local=[{"a": [*of_rank]} for of_rank in own],
        reduced=[{"a": array} for array in reduced],
        taken=[{"a": array} for array in reduced],
        micro_batches=MICRO_BATCHES,
        close=1e-5,
        clipped=False,
        not_mean=[(rank, "a") for rank in range(len(own))],
    )


SOME = [[[1, 1], [1, 1], [0, 0]]] * 2 + [[[0, 0], [0, 0], [1, 1]]]
DOUBLED = [[[2, 2], [1, 1], [1, 1]]] * RANKS
DECAYS = [[[0.5, 1]] * RANKS] * RANKS


@pytest.mark.parametrize(
    ("weights", "cause", "fields"),
    [
        (SOME, "gradient_of_some_ranks", {"rank": 0, "ranks": [0, 1]}),
        (DOUBLED, "ranks_weigh_unequally", {"shares": [0.5, 0.25, 0.25]}),
        (DECAYS, "micro_batches_weigh_unequally", {"shares": [0.3333, 0.6667]}),
        (np.multiply(DECAYS, 7), "micro_batches_weigh_unequally", {"shares": [0.3333, 0.6667]}),
    ],
)
def test_weights_name_what_is_no_mean(weights: Any, cause: str, fields: dict[str, Any]) -> None:
    found = GradientWeights.read(gradients(weights))
    said = found and found.cause()
    assert said and said.id == cause and fields.items() <= said.fields.items()


def test_even_weights_and_what_no_weights_give_name_nothing() -> None:
    found = GradientWeights.read(gradients(np.ones((RANKS, RANKS, MICRO_BATCHES)), noise=1e-8))
    assert found and found.cause() is None
    assert GradientWeights.read(gradients(DOUBLED, noise=0.1)) is None


def test_ranks_with_one_gradient_are_not_told_apart() -> None:
    """Each weight of the two then gives the same sum: no figure would be a fact."""
    same = OWN.copy()
    same[1] = same[0]
    assert GradientWeights.read(gradients(DOUBLED, own=same)) is None


def test_few_values_fit_nothing() -> None:
    assert GradientWeights.read(gradients(DOUBLED, own=OWN[:, :, :10])) is None
    assert fit(OWN[0, 0], []) is None
    assert multiple_of(3 * OWN[0, 0], OWN[0, 0]) == pytest.approx((3.0, 0.0), abs=1e-12)


COUNTS = np.array([[8, 8], [4, 4], [6, 2]])
BY_COUNTS = np.broadcast_to(COUNTS / COUNTS.sum(), (RANKS, RANKS, MICRO_BATCHES))


def ranks_of(counts: Any, rows: Any, reduction: str = "mean", weight: float = 1.0) -> Any:
    """Ranks whose micro-batches have a loss of so many targets. weight: of a sum, times its number of targets."""
    ranks = []
    for of_rank, of_rows in zip(counts, rows):
        micro_batches = [
            SimpleNamespace(
                rows=range(number),
                losses=[SimpleNamespace(reduction=reduction, count=count, weight=weight / max(1, count))],
            )
            for count, number in zip(of_rank, of_rows)
        ]
        ranks.append(SimpleNamespace(steps=[SimpleNamespace(micro_batches=micro_batches)]))
    return ranks


MEANS = ranks_of(COUNTS, COUNTS)


@pytest.mark.parametrize(
    ("weights", "ranks", "is_mean"),
    [
        (BY_COUNTS, MEANS, True),
        (BY_COUNTS * 3, MEANS, True),
        (BY_COUNTS, ranks_of(COUNTS, COUNTS, "sum", weight=1.0), True),
        (BY_COUNTS, ranks_of(COUNTS, COUNTS, "sum", weight=3.0), False),
        (BY_COUNTS, ranks_of(COUNTS * 0, COUNTS, "unknown"), True),
        # Each rank divides by a number of its own.
        (BY_COUNTS * np.array([1, 2, 4])[:, None, None], MEANS, False),
        (np.array(DOUBLED), MEANS, False),
        # The losses are means over targets, and the weights are the rows'.
        (BY_COUNTS, ranks_of(COUNTS[::-1], COUNTS), False),
        # One rank's gradient alone is not nearly that of a few more rows.
        (np.array([[[1, 1], [0, 0], [0, 0]]] * RANKS), ranks_of([[300, 300], [1, 1], [1, 1]], COUNTS), False),
    ],
)
def test_weights_by_numbers_of_targets_are_the_mean_over_all(weights: Any, ranks: Any, is_mean: bool) -> None:
    """Where each rank's loss is the mean over its own."""
    found = GradientWeights.read(gradients(weights))
    assert found and found.are_mean_over_all(ranks, 0) == is_mean


def test_weights_of_some_gradients_are_not_those_of_all() -> None:
    some = gradients(BY_COUNTS)
    some.not_mean = some.not_mean[:-1]
    found = GradientWeights.read(some)
    assert found and not found.are_mean_over_all(MEANS, 0)


def test_what_is_not_finite_is_not_fitted() -> None:
    broken = OWN.copy()
    broken[0, 0, 0] = np.nan
    assert fit(OWN[1, 1], [broken[0, 0]]) is None and fit(broken[0, 0], [OWN[1, 1]]) is None
