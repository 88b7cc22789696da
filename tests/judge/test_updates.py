"""Steps, closures, weights, rates and schedules of the ranks, on records that are made up. It needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from judge.test_script import NAMES, SIZE, STEPS, judged, ranks_of, recorded, with_steps
from samestep.judge.step_gradients import StepGradients
from samestep.judge.updates import (
    ended_apart,
    initial_weights,
    left_behind,
    rates,
    schedule,
    step_counts,
    unequal_calls,
    updates,
    weights,
    why_unequal_calls,
)
from samestep.message import Message, message
from samestep.records.record import Record
from samestep.records.script import ClosureRecord, ScriptRecord
from samestep.records.script_plan import ScriptPlan
from samestep.records.tensor_files import write_arrays


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_ranks_the_odd_one_is_named(odd: int, tmp_path: Path) -> None:
    first = ranks_of(tmp_path)[0]
    three = [with_steps(first, rates=[0.2]) if rank == odd else first for rank in range(3)]
    divergence = rates(three).divergence
    assert divergence and divergence.rank == odd
    three = [with_steps(first, weights={name: -1 for name in NAMES}) if rank == odd else first for rank in range(3)]
    divergence = weights(three).divergence
    assert divergence and divergence.rank == odd


@pytest.mark.parametrize(
    ("steps", "ended", "others"), [([8, 8], [1], [0]), ([9, 8], [1], [0]), ([5, 8], [1], None), ([8, 8], [], None)]
)
def test_a_rank_that_ends_its_training_while_others_go_on(
    steps: list[int], ended: list[int], others: list[int] | None
) -> None:
    expected = others and message("ranks_end_at_different_steps", rank=1, steps=8, others=others)
    assert ended_apart(steps, ended) == expected


def test_a_rank_that_leaves_after_an_exception_is_no_early_stopping() -> None:
    caught = message("exception_at_line", kind="OSError", text="", line="train.py:3, load")
    how = message("rank_caught_exception", caught=caught)
    expected = message("rank_leaves_after_exception", rank=1, steps=8, others=[0], how=how)
    assert ended_apart([8, 8], [1], {1: how}) == expected
    by_exit = message("rank_called_exit", code="0", line="train.py:9, <module>", caught=None)
    assert ended_apart([8, 8], [1], {1: by_exit}) == message(
        "ranks_end_at_different_steps", rank=1, steps=8, others=[0]
    )


def advancing(rank: ScriptRecord, by: int) -> ScriptRecord:
    return replace(rank, steps=[replace(step, schedules=[by * n]) for n, step in enumerate(rank.steps)])


@pytest.mark.parametrize(
    ("by", "libraries", "answer", "said"),
    [
        (0, [], "right", message("schedule_advances_once_a_step", advances=0, steps=4)),
        (1, [], "right", message("schedule_advances_once_a_step", advances=3, steps=4)),
        (2, [], "differs", message("schedule_advances_once_per_rank")),
        (2, ["accelerate"], "unknown", message("schedule_advances_once_per_process", advances=2)),
        (3, ["accelerate"], "differs", message("schedule_advances_several_times")),
    ],
)
def test_how_often_a_schedule_advances(
    by: int, libraries: list[str], answer: str, said: Message, tmp_path: Path
) -> None:
    ranks = [replace(advancing(rank, by), libraries=libraries) for rank in ranks_of(tmp_path)]
    finding = schedule(ranks)
    assert (finding.answer, finding.message) == (answer, said)


def test_small_updates_may_vanish_in_16_bits(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "one stays")
    assert updates(ranks, Record(tmp_path)).answer == "differs"
    assert updates([with_steps(rank, dtypes=["bfloat16"]) for rank in ranks], Record(tmp_path)).answer == "unknown"


def test_what_no_optimizer_holds_is_told_before_gradients_that_nothing_clears(tmp_path: Path) -> None:
    held = [name for name in NAMES if name != "b.bias"]
    ranks = [with_steps(rank, held=held) for rank in ranks_of(tmp_path, "one stays")]
    finding = updates(ranks, Record(tmp_path))
    said = message("optimizer_without_some_parameters", still=1, with_gradient=4, names=["b.bias"])
    assert (finding.answer, finding.message) == ("warning", said)
    assert "b.bias" not in StepGradients.read(Record(tmp_path), ranks, 0).names
    copied = [with_steps(rank, held=held, foreign=1) for rank in ranks]
    assert updates(copied, Record(tmp_path)).message == message("optimizer_of_a_copy", with_gradient=1)


def test_a_held_parameter_may_take_steps_below_its_resolution(tmp_path: Path) -> None:
    assert judged(tmp_path, "one stays").answer == "differs"
    ranks = [replace(of, steps=[replace(step, held=NAMES) for step in of.steps]) for of in recorded(tmp_path)]
    assert updates(ranks, Record(tmp_path)).answer == "right"


def test_gradients_that_never_come_to_the_optimizer_are_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", {})
    ranks = [replace(of, steps=[replace(step, lost=NAMES, moved=[]) for step in of.steps]) for of in recorded(tmp_path)]
    found = updates(ranks, Record(tmp_path))
    assert (found.answer, found.message.id) == ("differs", "gradients_never_reach_the_optimizer")
    moved = [replace(of, steps=[replace(step, moved=NAMES) for step in of.steps]) for of in ranks]
    assert updates(moved, Record(tmp_path)).answer == "right"  # an optimizer of flat copies


@pytest.mark.parametrize(
    ("calls", "done", "step"),
    [
        (([3, 3], [3, 3]), (2, 2), None),
        (([3, 4], [3, 3]), (2, 2), 1),
        (([3, 4], [3, 3]), (2, 1), None),  # rank 1 goes on
        (([3, 4], [3, 5]), (2, 1), 1),
        (([3, 4], [3, 5]), (1, 1), None),  # both go on
        (([3, 4], [3]), (2, 1), None),  # the script has ended on rank 1
        (([2, 1], [3]), (1, 0), 0),
        ((), (), None),
    ],
)
def test_a_closure_is_called_as_often_on_each_rank(
    calls: tuple[list[int], ...], done: tuple[int, ...], step: int | None
) -> None:
    assert unequal_calls([*map(ClosureRecord, calls, done)]) == step


def test_a_closure_that_is_called_more_often_on_one_rank_is_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    ranks = [
        replace(of, steps=[replace(step, calls=5 + (of.rank and number == 2)) for number, step in enumerate(of.steps)])
        for of in recorded(tmp_path)
    ]
    found = step_counts(ScriptPlan("", 0.0, "train.py", (), STEPS), ranks)
    assert found.answer == "differs" and found.divergence and found.divergence.step == 2
    calls = [message("calls_on_rank", calls=5, rank=0), message("calls_on_rank", calls=6, rank=1)]
    assert found.message == message("closure_called_unequally", step=2, calls=calls)
    cause = why_unequal_calls([ClosureRecord([5], 1), ClosureRecord([6], 0)], 0)
    assert cause.fields["calls"][1] == message("calls_or_more_on_rank", calls=6, rank=1)


@pytest.mark.parametrize(
    ("steps", "ended", "behind"),
    [
        ([8, 0], {0}, {1: 0}),
        ([7, 8, 6], {1}, {0: 7, 2: 6}),
        ([3, 3], set(), {}),  # another loss of a peer
        ([8, 8], {0}, {}),
    ],
)
def test_ranks_that_step_less_often_are_named(steps: list[int], ended: set[int], behind: dict[int, int]) -> None:
    took = [message("rank_took_only", rank=rank, steps=taken) for rank, taken in behind.items()]
    expected = message("ranks_left_behind", rank=min(ended, default=0), steps=8, behind=took)
    assert left_behind(steps, ended) == (expected if behind else None)


def test_parameters_that_one_rank_holds_frozen_are_named(tmp_path: Path) -> None:
    first, second = ranks_of(tmp_path)[:2]
    name, *others = NAMES
    ranks = [first, replace(second, start={f"{name} (frozen)": 1, **dict.fromkeys(others, 1)})]
    finding = initial_weights(ranks)
    assert finding.message == message("parameters_frozen_on_some_ranks", ranks=[1], frozen=1)
    assert finding.divergence and (finding.divergence.tensor, finding.divergence.rank) == (name, 1)
    # Frozen on all, it is no trained weight of any.
    assert initial_weights([ranks[1], ranks[1]]).answer == "right"
