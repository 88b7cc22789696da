"""The numbers and files that stand for the reference's tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.jobs_drawn import job as drawn
from samestep import reference
from samestep.engine import Layout
from samestep.proof.compare import distance, largest_of
from samestep.proof.trace import sample_like
from samestep.records import packed
from samestep.records.record import Record
from samestep.reference import first_gradient
from samestep.tasks import reference_tensors

STATES = {
    "equal infinities": ([math.inf, 1.0, -math.inf], [math.inf, 1.5, -math.inf]),
    "equal NaNs": ([1.0, math.nan, 2.0], [1.5, math.nan, 2.0]),
    "a NaN": ([1.0, math.nan, 2.0], [1.0, 1.0, 2.0]),
    "an infinity": ([1.0, math.inf], [1.0, 1.0]),
    "whole numbers": ([1, 5, 9], [1, 7, 9]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", STATES)
def test_the_player_measures_distances_as_the_judge_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_tensors, "BLOCK", 2)
    one, other = map(torch.tensor, STATES[name])
    (found,) = reference_tensors.from_plain({"w": one}, {"w": other}, ["w"]).values()
    judged = distance(one.numpy(), other.numpy()), largest_of(one.numpy())
    assert (found.distance, found.largest) == pytest.approx(judged, nan_ok=True)


def test_a_start_is_as_short_as_it_can_be_and_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_gradient, "ELEMENTS", 3)
    exact, wide = torch.randn(3, 3).double(), torch.randn(9, dtype=torch.float64)
    reference_tensors.write_start(tmp_path, 0, "float64", {"exact": exact, "wide": wide, "count": torch.tensor(3)})
    start = Record(tmp_path).arrays("start.float64")
    assert start["exact"].dtype == np.float32 and start["wide"].dtype == np.float64 and start["count"] == 3
    for name, whole in (("exact", exact), ("wide", wide)):
        assert len(start[name]) == 3
        assert np.array_equal(start[name], sample_like(whole.numpy(), start[name]))


def test_a_state_that_others_are_differences_from_is_read_without_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = drawn(rows=16, global_batch=8)
    first, second = (reference.play(job, Layout(1), steps) for steps in (1, 2))
    reference_tensors.write_training(tmp_path, 0, "0.gradient", first)
    reference_tensors.write_training(tmp_path, 0, "0.sgd", second, near="0.gradient")
    for name, values in Record(tmp_path).arrays("0.sgd").items():
        assert np.array_equal(values, second.state[name].numpy())
    monkeypatch.setattr(packed, "unpack", lambda *_: pytest.fail("it is packed"))
    for name, values in Record(tmp_path).arrays("0.gradient").items():
        assert np.array_equal(values, first.state[name].numpy())


@pytest.mark.parametrize("name", STATES)
def test_the_player_measures_movements_as_the_judge_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_tensors, "BLOCK", 2)
    start, end = map(torch.tensor, STATES[name])
    (found,) = reference_tensors.moved_from({"w": start, "other": start}, {"w": end}).values()
    judged = distance(end.numpy(), start.numpy()), largest_of(start.numpy())
    assert (found.distance, found.largest_before) == pytest.approx(judged, nan_ok=True)


@pytest.mark.parametrize("elements", [1, 5, 6, 7, 23, 64])
def test_the_judge_finds_the_elements_of_a_sample(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_gradient, "ELEMENTS", 6)
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.arange(float(elements))
    (sampled,) = first_gradient.sample([parameter])
    assert sampled is not None and len(sampled) <= 6
    assert np.array_equal(sample_like(parameter.grad.numpy(), sampled.numpy()), sampled.numpy())


def test_the_parts_of_the_first_gradient_add_up() -> None:
    job = drawn(rows=64, global_batch=16, micro_batch=4)
    layout = Layout(2)
    result = reference.play(job, layout, 1, parts=True)
    first, second = ([part for part in replica if part.step == 0] for replica in result.micro_batches)
    assert len(first) == len(second) == 2
    assert result.own and result.before_last and result.own_before_last
    assert result.own.keys() == result.before_last.keys()
    assert any(not torch.equal(result.own[name], result.own_before_last[name]) for name in result.own)
