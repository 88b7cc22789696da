"""What all ranks do alike, and what they do at different steps, on records that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from judge.test_script import NAMES, ranks_of, with_steps
from samestep.judge.frozen_weights import with_effects
from samestep.judge.warnings import warnings
from samestep.message import Message, message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.findings import Finding
from samestep.records.script import MicroBatchRecord, ScriptRecord


def warned(ranks: list[ScriptRecord]) -> list[Message]:
    findings = warnings(ranks)
    assert all(finding.answer == "warning" for finding in findings)
    return [finding.message for finding in findings]


def test_nothing_is_said_of_a_healthy_record(tmp_path: Path) -> None:
    assert warned(ranks_of(tmp_path)) == []


def test_a_gather_without_gradient_matters_where_one_process_has_another(tmp_path: Path) -> None:
    ranks = [with_steps(rank, cut_gathers=1) for rank in ranks_of(tmp_path)]
    assert warned(ranks) == [message("gather_without_gradient", step=0, ranks=len(ranks))]
    right = with_effects(warnings(ranks), [Finding("replayed gradient", "right", message("one_rank"))])
    assert [finding.answer for finding in right] == ["right"]


def test_ranks_that_share_out_a_model_each_have_the_whole_loss_of_what_they_gather(tmp_path: Path) -> None:
    ranks = [with_steps(rank, cut_gathers=1, micro_batches=[MicroBatchRecord([1, 2])]) for rank in ranks_of(tmp_path)]
    assert warned(ranks) == []


def test_a_tied_weight_comes_apart_where_the_two_do_not_stay_the_same(tmp_path: Path) -> None:
    tied = [replace(rank, ties=[(NAMES[0], NAMES[1])]) for rank in ranks_of(tmp_path)]
    same = [with_steps(rank, weights=dict.fromkeys(NAMES, 1)) for rank in tied]
    assert warned(same) == []
    apart = [with_steps(rank, weights={name: number for number, name in enumerate(NAMES)}) for rank in tied]
    assert warned(apart) == [message("tied_weight_comes_apart", embedding=NAMES[0], head=NAMES[1])]


@pytest.mark.parametrize(
    ("still", "rates", "warns"),
    [
        (0.9, [1e-5] * 4, True),
        (0.2, [1e-5] * 4, False),
        (0.9, [1e-8, 1e-7, 1e-6, 1e-5], False),
        (None, [1e-5] * 4, False),
    ],
)
def test_updates_are_lost_in_rounding_unless_the_rate_warms_up(
    still: float | None, rates: list[float], warns: bool, tmp_path: Path
) -> None:
    ranks = []
    for rank in ranks_of(tmp_path):
        steps = [replace(step, rates=[rate]) for step, rate in zip(rank.steps, rates)]
        ranks.append(replace(rank, steps=steps, still=still))
    assert [said.id for said in warned(ranks)] == ["updates_lost_in_rounding"] * warns


def test_a_rank_that_skips_a_batch_is_named(tmp_path: Path) -> None:
    def with_forwards(rank: ScriptRecord, forwards: int, **fields: Any) -> ScriptRecord:
        return with_steps(rank, micro_batches=[MicroBatchRecord([], forwards=forwards, **fields)])

    first, second = ranks_of(tmp_path)[:2]
    ranks = [with_forwards(first, 1, passes=[0]), with_forwards(second, 2, passes=[0])]
    assert warned(ranks) == [message("step_skipped_on_some_ranks", ranks=[1], step=0, forwards=2, fewer=1)]
    assert warned([with_forwards(first, 1), with_forwards(second, 2)]) == []  # what a rank makes itself may vary


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [([0, 2], [0, 2], None), ([0, 2], [], None), ([0, 2, 3], [0, 3], 2), ([0, 2], [0, 3], 2)],
)
def test_ranks_that_roll_out_at_different_steps(
    first: list[int], second: list[int], step: int | None, tmp_path: Path
) -> None:
    ranks = [
        replace(rank, rollouts=[(step, 8) for step in at]) for rank, at in zip(ranks_of(tmp_path), (first, second))
    ]
    explores = [replace(rank, rollouts=[(step, 1 + step % 2) for step, _ in rank.rollouts]) for rank in ranks]
    assert warned(explores) == []
    assert warned(ranks) == ([message("ranks_part_at_a_step", ranks=[0, 1], step=step)] if step else [])


@pytest.mark.parametrize(
    ("value", "apart", "calls", "said"),
    [
        (0.6931471824645996, 0.0, 4, ["reference_follows_policy"]),
        (0.6931471824645996, 0.0, 0, ["loss_never_changes"]),
        # A loss that changes, one of 16 bits, and one of advantages whose mean is taken away.
        (0.6931471824645996, 1e-3, 4, []),
        (10.75, 0.0, 4, []),
        (3e-8, 0.0, 4, []),
    ],
)
def test_a_loss_that_never_changes_compares_a_thing_with_itself(
    value: float, apart: float, calls: int, said: list[str], tmp_path: Path
) -> None:
    ranks = []
    for rank in ranks_of(tmp_path):
        steps = [
            replace(step, micro_batches=[replace(batch, value=value + apart * number) for batch in step.micro_batches])
            for number, step in enumerate(rank.steps)
        ]
        call = CallRecord("evaluation", "Net", [CallSite("train.py", 3)], count=calls)
        ranks.append(replace(rank, steps=steps, calls=[call]))
    assert [message.id for message in warned(ranks)] == said
