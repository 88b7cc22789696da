"""How far rounding explains a figure of an evaluation: torchmetrics count in float32, whatever the outputs are."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.proof.compare import evaluation_bound
from samestep.records.training_record import EvaluationRecord

EPS = 2.0**-52
VALUE = float(np.float32(17.930667877197266))


@pytest.mark.parametrize(
    ("value", "whole", "explains"),
    [(VALUE, ("perplexity",), True), (VALUE, (), False), (VALUE + 1e-9, ("perplexity",), False)],
    ids=["a metric that counts by itself", "a sum over rows", "one that counts in float64"],
)
def test_two_units_of_float32(value: float, whole: tuple[str, ...], explains: bool) -> None:
    noisy = [EvaluationRecord(12, 12.0, {"perplexity": value}, whole)] * 2
    bound = evaluation_bound("perplexity", value, noisy, EPS)
    assert bool(bound > 2 * np.spacing(np.float32(value))) is explains
    assert bound < 1e-5 * value  # no row is lost in it
