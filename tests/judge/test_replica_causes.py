"""The mistakes within a replica that are tried against one process's gradient, each beside one that it is not."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from samestep.judge import replica_causes
from samestep.judge.layout import TensorLayout
from samestep.judge.step_gradients import Array
from samestep.records.divided_models import PieceRecord
from samestep.records.script import MicroBatchRecord, ScriptRecord, StepRecord

LAYOUT = TensorLayout([[0, 1]], ["tensor"], [])
NAMES = ["divided", "norm"]
ONE: dict[str, Array] = {"divided": np.array([3.0, 4.0]), "norm": np.array([5.0])}


def ranks(*losses: float) -> list[ScriptRecord]:
    pieces = {"divided": PieceRecord(0, ["shard"], [0], [1], 0)}
    return [
        ScriptRecord(rank, 2, {"divided": 1, "norm": 1}, [_step(loss)], [], "steps", [], 0.1, [0.1], pieces=pieces)
        for rank, loss in enumerate(losses)
    ]


def _step(loss: float) -> StepRecord:
    return StepRecord(0, [MicroBatchRecord(["row"], value=loss)], [0.1], [], [], 0, None, {}, [])


def scaled(factor: float) -> dict[str, Array]:
    return {name: factor * gradient for name, gradient in ONE.items()}


@pytest.mark.parametrize(
    ("factor", "is_found"),
    [(np.sqrt(50 / 75), True), (1.0, False), (0.5, False), (np.sqrt(75 / 50), False)],
)
def test_a_norm_that_counts_copies_has_a_factor_of_its_own(factor: float, is_found: bool) -> None:
    found = replica_causes._by_norm_of_copies(ranks(1.0, 1.0), LAYOUT, NAMES, scaled(factor), ONE)
    assert (found is not None) == is_found
    apart = {**scaled(factor), "norm": np.array([1.0])}
    assert replica_causes._by_norm_of_copies(ranks(1.0, 1.0), LAYOUT, NAMES, apart, ONE) is None


def test_losses_of_the_ranks_of_a_replica() -> None:
    assert replica_causes._losses_apart(ranks(1.0, 1.5), LAYOUT, 0) == [1.0, 1.5]
    assert replica_causes._losses_apart(ranks(1.0, 1.0 + 1e-8), LAYOUT, 0) == []
    assert replica_causes._losses_apart(ranks(1.0, 1.5), TensorLayout([[0], [1]], [], ["data"]), 0) == []


def test_elements_without_a_gradient_are_all_that_differs() -> None:
    left = {"divided": np.array([3.0, 0.0]), "norm": np.array([5.0])}
    assert replica_causes._elements_without_gradient(NAMES, left, ONE) == ("divided", 1)
    assert replica_causes._elements_without_gradient(NAMES, ONE, ONE) is None
    others = cast("dict[str, Array]", {**left, "norm": np.array([6.0])})
    assert replica_causes._elements_without_gradient(NAMES, others, ONE) is None
