"""Stages of a pipeline that a script writes itself, whose layers have the same names on each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from samestep.judge import judge
from samestep.judge.by_hand import Division
from samestep.judge.clipping import clipped_together
from samestep.judge.judge_by_hand import held_findings
from samestep.judge.layout import ByHand, Layout
from samestep.records.divided_models import HeldPiece, TalkRecord
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import ClipRecord, LossRecord, MicroBatchRecord, ScriptRecord, StepRecord
from samestep.records.script_plan import ScriptPlan
from samestep.records.tensor_files import write_arrays

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
    assert [[of.rank for of in stage] for stage in Layout.of(ranks).stages] == stages


def test_ranks_of_other_shapes_are_no_replicas(tmp_path: Path) -> None:
    ranks = [rank(0, loss=True), rank(1, loss=True, size=5)]
    assert Layout.of(ranks).other_shape == "0.weight"
    assert Layout.of([ranks[0], ranks[0]]).kind == "replicas"
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), 1), ranks, Record(tmp_path))
    said = {finding.question: finding.message.id for finding in results.findings if finding.answer == "unknown"}
    assert said["gradient"] == said["initial weights"] == "ranks_hold_other_shapes"
    assert results.answer == "unknown"
    cut = [replace(of, steps=[replace(of.steps[0], sharded=True)]) for of in ranks]
    assert Layout.of(cut).kind == "replicas"


# By which norm ranks are clipped: those of two gradients, of norms 3 and 4


def clipped(folder: Path, factors: tuple[float, float], limit: float = 1.0) -> list[ScriptRecord]:
    """Two ranks whose gradients are multiplied by these factors."""
    ranks = []
    for number, factor in enumerate(factors):
        gradient = np.zeros(4)
        gradient[number] = 3.0 + number
        arrays = {"taken 0.weight": gradient * factor, "unclipped 0.weight": gradient}
        write_arrays(folder / f"rank{number}.step0.npz", arrays)
        of = rank(number, 1 - number, loss=True)
        step = replace(of.steps[0], clips=[ClipRecord(1, 1, 1, limit)], dtypes=["float32"])
        ranks.append(replace(of, steps=[step]))
    return ranks


@pytest.mark.parametrize(
    ("factors", "limit", "answer", "said"),
    [
        ((0.2, 0.2), 1.0, "right", "clipped_by_the_whole_norm"),
        ((1 / 3, 1 / 4), 1.0, "differs", "clipped_by_stage_norms"),
        ((1 / 3, 1 / 3), 1.0, "differs", "clipped_by_another_norm"),
        ((1.0, 1.0), 9.0, "unknown", "no_step_reached_the_limit"),
    ],
)
def test_stages_are_clipped_by_the_norm_of_all(
    factors: tuple[float, float], limit: float, answer: str, said: str, tmp_path: Path
) -> None:
    ranks = clipped(tmp_path, factors, limit)
    finding = clipped_together([[of] for of in ranks], Record(tmp_path))
    assert finding and (finding.answer, finding.message.id) == (answer, said)


def test_a_stage_that_clips_nothing_beside_one_that_does_is_clipped_by_its_own_norm(tmp_path: Path) -> None:
    ranks = clipped(tmp_path, (0.2, 1.0))
    idle = replace(ranks[1], steps=[replace(ranks[1].steps[0], clips=[])])
    finding = clipped_together([[ranks[0]], [idle]], Record(tmp_path))
    assert finding and (finding.answer, finding.message.id) == ("differs", "clipped_by_stage_norms")


def test_a_norm_that_one_process_has_counts_in_place_of_that_of_the_records(tmp_path: Path) -> None:
    ranks = clipped(tmp_path, (0.2, 0.2))
    answers = [clipped_together([[of] for of in ranks], Record(tmp_path), {0: norm}) for norm in (5.0, 7.0)]
    assert [finding.message.id for finding in answers if finding] == [
        "clipped_by_the_whole_norm",
        "clipped_by_another_norm",
    ]


@pytest.mark.parametrize(
    ("factors", "said"),
    [((0.2, 0.2), "clipped_by_the_whole_norm"), ((0.2, 0.7), "clipped_by_another_norm")],
    ids=["one norm", "a norm for each call"],
)
def test_a_stage_that_is_clipped_by_two_calls_is_judged_by_the_norm_of_one_process(
    factors: tuple[float, float], said: str, tmp_path: Path
) -> None:
    """As where a rank has two stages, or two groups of parameters."""
    (first, _) = clipped(tmp_path, (0.2, 0.2))
    gradients = {"0.weight": np.full(4, 2.0), "1.weight": np.full(4, 1.5)}
    arrays = {f"unclipped {name}": array for name, array in gradients.items()}
    arrays |= {f"taken {name}": array * factor for (name, array), factor in zip(gradients.items(), factors)}
    write_arrays(tmp_path / "rank0.step0.npz", arrays)
    twice = replace(first, steps=[replace(first.steps[0], clips=2 * [ClipRecord(1, 1, 2, 1.0)])])
    finding = clipped_together([[twice]], Record(tmp_path), {0: 5.0})
    assert finding and finding.message.id == said
    assert clipped_together([[twice]], Record(tmp_path)) is None
    # Some parameters are left out, as they may be on purpose.
    in_part = replace(twice, steps=[replace(twice.steps[0], clips=[ClipRecord(1, 1, 2, 1.0)])])
    assert clipped_together([[in_part]], Record(tmp_path), {0: 5.0}) is None


def test_a_tied_parameter_counts_once_or_on_each_stage(tmp_path: Path) -> None:
    ranks = clipped(tmp_path, (0.5, 0.5))
    for number in range(2):
        arrays = {"taken tied.weight": np.full(4, 0.5), "unclipped tied.weight": np.ones(4)}
        write_arrays(tmp_path / f"rank{number}.step0.npz", arrays)
    finding = clipped_together([[of] for of in ranks], Record(tmp_path))
    assert finding and finding.answer == "right"


@pytest.mark.parametrize(
    "clips", [[ClipRecord(1, 1, 1, None)], [ClipRecord(1, 1, 2, 1.0)], 2 * [ClipRecord(1, 1, 1, 1.0)]]
)
def test_what_is_clipped_by_values_or_in_parts_has_no_one_factor(clips: list[ClipRecord], tmp_path: Path) -> None:
    ranks = [replace(of, steps=[replace(of.steps[0], clips=clips)]) for of in clipped(tmp_path, (0.2, 0.3))]
    assert clipped_together([[of] for of in ranks], Record(tmp_path)) is None
    assert "clipping" not in held(ranks, tmp_path)


def held(ranks: list[ScriptRecord], folder: Path) -> dict[str, Finding]:
    """Returns question -> what is told of ranks that each hold half of a weight."""
    pieces = [HeldPiece(number, "0.weight", 0, 3 * number, 3) for number in range(2)]
    division = Division(ByHand([[0, 1]], [0], True, False, False), "tensor", {"0.weight": pieces})
    return {finding.question: finding for finding in held_findings(division, ranks, Record(folder))}


def test_what_ranks_hold_is_compared_without_a_replay(tmp_path: Path) -> None:
    ranks = clipped(tmp_path, (0.2, 0.2))
    found = held(ranks, tmp_path)
    assert found["initial weights"].answer == found["weights"].answer == "right" and "clipping" not in found
    alike = held([replace(of, start={"0.weight": 7}) for of in ranks], tmp_path)
    assert alike["initial weights"].message.id == "pieces_begin_alike"
    zeros = [replace(of, start={"0.weight": 7}, uniform=["0.weight"]) for of in ranks]
    assert held(zeros, tmp_path)["initial weights"].answer == "right"


@pytest.mark.parametrize(
    ("shapes", "frozen", "left"),
    [
        (["0.weight"], [5, 5], None),
        (["0.weight", "1.weight"], [5, 5], "1.weight"),  # which the replay has ended before
        (["0.weight"], [5, 6], "base.weight (frozen)"),  # pieces, or other values
    ],
)
def test_what_could_not_be_compared_is_not_right(
    shapes: list[str], frozen: list[int], left: str | None, tmp_path: Path
) -> None:
    ranks = [
        replace(of, shapes={name: [3, 2] for name in shapes}, start={**of.start, "base.weight (frozen)": value})
        for of, value in zip(clipped(tmp_path, (0.2, 0.2)), frozen, strict=True)
    ]
    for question in ("initial weights", "weights"):
        finding = held(ranks, tmp_path)[question]
        assert (finding.answer, finding.message.fields.get("parameter")) == ("unknown" if left else "right", left)


def test_of_ranks_that_hold_what_is_not_known_nothing_is_told(tmp_path: Path) -> None:
    """As of stages that are divided by columns, whose weights are put together of none of them."""
    division = Division(ByHand([[0, 1]], [0], True, True, False), "sequence", {})
    assert held_findings(division, clipped(tmp_path, (0.2, 0.3)), Record(tmp_path)) == []


def test_ranks_of_a_replica_are_clipped_by_one_norm(tmp_path: Path) -> None:
    found = held(clipped(tmp_path, (0.2, 0.2001)), tmp_path)
    assert found["clipping"].message.id == "clipped_by_local_norms"
    assert found["clipping"].divergence and found["clipping"].divergence.rank == 1
