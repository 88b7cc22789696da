"""Which ranks share out a model that the script divides itself, and what a replay of it takes back, on records that
are made up."""

from __future__ import annotations

import pytest

from samestep.judge.judge_by_hand import clipping_once
from samestep.judge.layout import ByHand, compute_together
from samestep.message import message
from samestep.records.divided_models import TalkRecord
from samestep.records.findings import Answer, Finding
from samestep.records.script import LossRecord, MicroBatchRecord, ScriptRecord, StepRecord

BITS = 0.6931471824645996  # ln 2: of two classes, with a head of zeros


def ranks_with(losses: list[tuple[float | None, float | None]]) -> list[ScriptRecord]:
    """Two ranks that talk in the forward pass, read the same rows, and begin with other weights of one shape."""
    ranks = []
    for number in range(2):
        steps = []
        for step, values in enumerate(losses):
            batch = MicroBatchRecord([f"row {step}"], [LossRecord(1.0, "mean", 3)], [], value=values[number])
            steps.append(StepRecord(0, [batch], [0.1], [], [], 0, None, {"weight": number}, ["weight"]))
        talks = [TalkRecord([0, 1], forward={"all_reduce": 1})]
        start, shapes = {"weight": number}, {"weight": [3, 3]}
        ranks.append(ScriptRecord(number, 2, start, steps, [], "steps", [], 0.1, [0.1], talks=talks, shapes=shapes))
    return ranks


@pytest.mark.parametrize(
    ("losses", "is_one"),
    [
        ([(BITS, BITS), (0.61, 0.61), (0.55, 0.55)], True),
        ([(BITS, BITS), (0.61, 0.61), (None, None)], True),
        ([(BITS, BITS), (0.61, 0.63), (0.55, 0.58)], False),  # replicas that begin apart, and a head of zeros
        ([(None, None), (0.61, 0.61)], False),
    ],
)
def test_ranks_that_compute_one_model_have_one_loss_in_each_step(
    losses: list[tuple[float | None, float | None]], is_one: bool
) -> None:
    layout = ByHand.of(ranks_with(losses))
    assert layout and layout.is_one_model == layout.is_certain == is_one


def ranks_of_other_rows(weights: list[dict[str, int]], backward: int = 1) -> list[ScriptRecord]:
    """Ranks that gather what they compute of rows of their own, and end a step with such weights."""
    ranks = []
    for number, digests in enumerate(weights):
        step = StepRecord(0, [MicroBatchRecord([f"row {number}"])], [0.1], [], [], 0, None, digests, [])
        talks = [
            TalkRecord([0, 1], forward={"all_gather": 1}, backward={"reduce_scatter": backward} if backward else {})
        ]
        start = {name: 0 for name in digests}
        ranks.append(ScriptRecord(number, 2, start, [step], [], "steps", [], 0.1, [0.1], talks=talks))
    return ranks


@pytest.mark.parametrize(
    ("weights", "backward", "holds_own"),
    [
        ([{"trunk": 1, "expert": 2}, {"trunk": 1, "expert": 3}], 1, True),
        ([{"trunk": 1, "expert": 2}, {"trunk": 1, "expert": 3}], 0, False),  # what is gathered has no gradient
        ([{"trunk": 1, "expert": 2}, {"trunk": 4, "expert": 3}], 1, False),  # nothing is reduced
        ([{"trunk": 1, "expert": 2}, {"trunk": 1, "expert": 2}], 1, False),
    ],
)
def test_ranks_that_compute_together_may_hold_experts(
    weights: list[dict[str, int]], backward: int, holds_own: bool
) -> None:
    ranks = ranks_of_other_rows(weights, backward)
    layout = ByHand.of(ranks)
    assert compute_together(ranks) == bool(backward)
    assert bool(layout and layout.holds_own and layout.is_certain) == holds_own


@pytest.mark.parametrize(
    ("held", "replayed", "said"),
    [
        (True, "unknown", "held"),
        (True, "right", "replayed"),
        (False, "unknown", "replayed"),
        (True, None, "held"),
    ],
)
def test_what_a_replay_does_not_know_of_clipping_takes_no_certain_difference_away(
    held: bool, replayed: Answer | None, said: str
) -> None:
    findings = [Finding("clipping", "differs", message("held"))] * held
    gradients = [Finding("clipping", replayed, message("replayed"))] if replayed else []
    assert [finding.message.id for of in clipping_once(findings, gradients) for finding in of] == [said]
