"""The judge of a user's script on what some kinds of scripts record: own datasets, optimizers that hold no gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proof.test_script import NAMES, SIZE, STEPS, judged
from samestep.proof.script.gradients import gradient
from samestep.proof.script.replay import drifts
from samestep.proof.script.rows import rows
from samestep.proof.script.updates import updates
from samestep.records.arrays import write_arrays
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.script import PassSeen, ScriptRecord


def recorded(folder: Path) -> list[ScriptRecord]:
    return [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]


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
    assert found.answer == "differs" and "none comes to the optimizer" in found.sentence
    moved = [replace(of, steps=[replace(step, moved=NAMES) for step in of.steps]) for of in ranks]
    assert updates(moved, Record(tmp_path)).answer == "right"  # an optimizer of flat copies


@pytest.mark.parametrize(("first", "answer"), [(0, "right"), (6, "differs")])
def test_rows_that_own_datasets_share_are_named(first: int, answer: str, tmp_path: Path) -> None:
    """Each rank has a dataset of 12 rows; rank 1's begins with `first` rows of rank 0's, at other indices."""
    judged(tmp_path, "mean")
    own = [[f"0 {row}" for row in range(12)], [f"0 {row}" for row in reversed(range(first))]]
    own[1] += [f"1 {row}" for row in range(12 - first)]
    ranks = [
        replace(of, passes=[PassSeen(0, 12, 1, [[i] for i in range(12)], [], [[row] for row in own[of.rank]], 12)])
        for of in recorded(tmp_path)
    ]
    found = rows(ranks)
    assert found.answer == answer, found
    assert answer == "right" or "random_split without a common generator" in found.sentence


def test_gradients_that_are_no_numbers_are_not_passed(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        of = dict.fromkeys((f"{kind} {name}" for name in NAMES for kind in ("taken", "local 0")), np.full(30, np.nan))
        write_arrays(tmp_path / f"rank{rank}.step2.npz", of)
    found = gradient(recorded(tmp_path), Record(tmp_path))[0]
    assert found.answer == "unknown" and "a.weight on rank 0 holds NaN or an infinity at step 2" in found.sentence


@pytest.mark.parametrize(
    ("apart", "found"),
    [
        ([2e-9, 2e-9, 2e-9, 2e-7, 1.4e-4, 2e-2], True),  # a transformer at a high rate
        ([2e-9, 2e-9, 2e-2], False),
        ([2e-9, 2e-9, 1e-3, 2e-2], False),
        ([1e-5, 1e-4, 1e-3, 2e-2], False),
    ],
)
def test_rounding_that_grows_is_no_mistake(apart: list[float], found: bool) -> None:
    assert drifts(apart) is found
