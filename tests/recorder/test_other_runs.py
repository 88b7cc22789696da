"""What is changed in a run that shows what a number depends on, and what is not."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
from torch import nn

from samestep.rank.hooks import Hooks
from samestep.recorder.other_runs import evaluate_with_other_weights, let_clock_run_faster


def test_an_evaluation_has_other_weights_and_leaves_them_as_they_were() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
    tokens, before = torch.arange(5), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens)
        other = evaluate_with_other_weights(lambda: model(tokens), model, (), {})
    assert not torch.allclose(expected, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_training_has_its_own_weights() -> None:
    model = nn.Linear(4, 3)
    rows = torch.ones(2, 4)
    assert torch.equal(evaluate_with_other_weights(lambda: model(rows), model, (), {}), model(rows))


def test_a_clock_runs_faster_until_it_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datetime, "datetime", datetime.datetime)  # it is put back after the test
    hooks, clock = Hooks(), time.perf_counter
    let_clock_run_faster(hooks)
    try:
        start, real = time.perf_counter(), clock()
        while clock() - real < 0.01:
            pass
        assert time.perf_counter() - start > 1.0
    finally:
        hooks.detach()
    assert time.perf_counter is clock
