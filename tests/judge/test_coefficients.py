"""Factors of a loss that look like a number of ranks or micro-batches, and are the loss's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from judge.test_script import judged, ranks_of, recorded, with_losses
from samestep.judge import with_coefficients, with_replay
from samestep.judge.coefficients import multiplied_sum, one_process_decides
from samestep.judge.source import Source
from samestep.message import message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.findings import Finding
from samestep.records.script import LossRecord

LOOP = "for inputs, targets in loader:\n    loss = {}\n    loss.backward()\n"


@pytest.mark.parametrize(
    ("loss", "weight", "micro_batches", "answer"),
    [
        ("0.5 * mse(model(inputs), targets)", 0.5, 1, "unknown"),
        ("mse(model(inputs), targets) / 2", 0.5, 1, "unknown"),
        ("mse(model(inputs), targets) / world_size", 0.5, 1, "differs"),
        ("2 * mse(model(inputs), targets) / accumulate", 1.0, 2, "unknown"),
        ("mse(model(inputs), targets)", 1.0, 2, "differs"),
    ],
)
def test_a_number_in_the_loss_may_be_meant(
    loss: str, weight: float, micro_batches: int, answer: str, tmp_path: Path
) -> None:
    results = judged(tmp_path, "mean", micro_batches, weight)
    call = CallRecord("backward", "backward", [CallSite("train.py", 3)])
    ranks = [replace(rank, calls=[call]) for rank in recorded(tmp_path)]
    results = with_coefficients(results, ranks, {"train.py": Source(LOOP.format(loss))})
    assert [finding.answer for finding in results.findings if finding.question == "loss weight"] == [answer]


@pytest.mark.parametrize(("replayed", "answer"), [("right", "right"), ("differs", "differs"), ("unknown", "differs")])
def test_one_process_decides_whether_a_factor_is_the_number_of_ranks(
    replayed: str, answer: str, tmp_path: Path
) -> None:
    results = judged(tmp_path, "mean", 1, 0.5)
    assert one_process_decides(results.findings)
    gradient = Finding("replayed gradient", replayed, message("one_rank"))  # type: ignore[arg-type]
    assert with_replay(results, [gradient]).answer == answer


def test_a_sum_over_its_own_rows_that_is_multiplied_by_the_ranks_is_warned_of(tmp_path: Path) -> None:
    ranks = [with_losses(rank, LossRecord(0.5, "sum", 4, "Sum", [2.0, 0.25])) for rank in ranks_of(tmp_path)]
    one_process = with_losses(ranks[0], LossRecord(0.25, "sum", 8, "Sum", [0.25]))
    found = multiplied_sum(ranks, one_process)
    assert found and found.message == message("loss_multiplied_by_ranks", ranks=2)
    of_all_rows = [with_losses(rank, LossRecord(0.25, "sum", 4, "Sum", [2.0, 0.125])) for rank in ranks]
    assert multiplied_sum(of_all_rows, one_process) is None
    assert multiplied_sum(ranks, ranks[0]) is None
