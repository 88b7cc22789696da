"""Stages of a pipeline that a script writes itself, whose layers have the same names on each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from samestep.proof.script import judge
from samestep.proof.script.hand_written_stages import shapes_apart, stages_that_talk
from samestep.records.divided_models import TalkRecord
from samestep.records.record import Record
from samestep.records.script import LossRecord, MicroBatchRecord, ScriptPlan, ScriptRecord, StepRecord

LOSS = LossRecord("MseLossBackward0", "mean", 1.0, 4)


def rank(number: int, *peers: int, loss: bool = False, size: int = 3, forward: bool = False) -> ScriptRecord:
    """A rank that sends to and receives from others. size: of its weight."""
    batch = MicroBatchRecord([f"row {number}"], [LOSS] if loss else [], [])
    step = StepRecord(0, [batch], [0.1], [], [], 0, None, {"0.weight": number}, ["0.weight"])
    counts = {"forward" if forward else "between": {"isend": 1, "irecv": 1}}
    talks = [TalkRecord(sorted((number, peer)), **counts) for peer in peers]
    shapes = {"0.weight": [size, size]}
    return ScriptRecord(
        number, 4, {"0.weight": number}, [step], [], "steps", [], 0.1, [0.1], talks=talks, shapes=shapes
    )


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        ([rank(0, 1), rank(1, 0, loss=True)], [[0], [1]]),
        ([rank(0, 1), rank(1, 0, 2), rank(2, 1, 3), rank(3, 2, loss=True)], [[0], [1], [2], [3]]),
        ([rank(0, 1), rank(1, 0, loss=True), rank(2, 3), rank(3, 2, loss=True)], [[0, 2], [1, 3]]),
        # A ring that adds gradients up, and attention over pieces of a sequence.
        ([rank(0, 1, loss=True), rank(1, 0, loss=True)], []),
        ([rank(0, 1, forward=True), rank(1, 0, forward=True, loss=True)], []),
        ([rank(0), rank(1, loss=True)], []),
    ],
)
def test_the_stages_that_hand_on_what_they_compute(ranks: list[ScriptRecord], stages: list[list[int]]) -> None:
    assert [[of.rank for of in stage] for stage in stages_that_talk(ranks)] == stages


def test_ranks_of_other_shapes_are_no_replicas(tmp_path: Path) -> None:
    ranks = [rank(0, loss=True), rank(1, loss=True, size=5)]
    assert shapes_apart(ranks) == "0.weight" and shapes_apart([ranks[0], ranks[0]]) is None
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), 1), ranks, Record(tmp_path))
    said = {finding.question: finding.message.id for finding in results.findings if finding.answer == "unknown"}
    assert said["gradient"] == said["initial weights"] == "ranks_hold_other_shapes"
    assert results.answer == "unknown"
    cut = [replace(of, steps=[replace(of.steps[0], sharded=True)]) for of in ranks]
    assert shapes_apart(cut) is None
