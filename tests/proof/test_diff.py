"""`samestep diff`, on records that are made up: what it names, and how close is close enough. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proof.test_script import NAMES, STEPS, judged
from samestep.commands.diff import diff
from samestep.records.arrays import write_arrays
from samestep.records.files import read, write
from samestep.records.replay import END, START
from samestep.records.script import PLAN, DiffResults, ScriptPlan, ScriptRecord, StepSeen


def recorded(folder: Path, kind: str = "mean", end: float = 1.0) -> Path:
    """A folder as `samestep check` leaves it. end: of every weight; they start at 0."""
    folder.mkdir()
    judged(folder, kind)
    write(folder / PLAN, ScriptPlan(str(folder), 0.0, "train.py", (), STEPS))
    for name, value in ((START, 0.0), (END, end)):
        write_arrays(folder / f"rank0.{name}.npz", {each: np.full(30, value) for each in NAMES})
    return folder


def edit(folder: Path, rank: int, change: Callable[[ScriptRecord], ScriptRecord]) -> None:
    write(folder / f"rank{rank}.json", change(read(ScriptRecord, folder / f"rank{rank}.json")))


def each_step(change: Callable[[StepSeen], StepSeen], since: int = 0) -> Callable[[ScriptRecord], ScriptRecord]:
    """Changes the steps of a record, from number `since` on."""
    return lambda record: replace(record, steps=[*record.steps[:since], *map(change, record.steps[since:])])


def differing(results: DiffResults) -> list[str]:
    return [each.question for each in results.findings if each.answer == "differs"]


def test_records_are_compared_as_far_as_every_rank_has_come(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    edit(other, 1, lambda record: replace(record, steps=record.steps[:2]))
    results = diff(one, other)
    assert (results.answer, results.steps) == ("right", 2), results.findings
    assert "2 steps are compared (as many as both have)" in results.findings[0].sentence


def test_gradients_that_are_not_finite_are_not_the_same(tmp_path: Path) -> None:
    results = diff(recorded(tmp_path / "one", "not finite"), recorded(tmp_path / "other", "not finite"))
    assert results.answer == "unknown"
    assert "a gradient holds NaN or an infinity at step 0" in [each.sentence for each in results.findings]


def other_name(record: ScriptRecord) -> ScriptRecord:
    return replace(record, start={**record.start, "c.weight": 1})


def row_twice(step: StepSeen) -> StepSeen:
    (micro,) = step.micro
    return replace(step, micro=[replace(micro, rows=[*micro.rows, micro.rows[0]])])


@pytest.mark.parametrize(
    ("change", "question", "step", "found"),
    [
        (other_name, "initial weights", None, 5),
        (each_step(row_twice, since=1), "rows", 1, "7 rows, 6 of them"),
        (each_step(lambda step: replace(step, rates=[0.10001]), since=2), "rate", 2, [0.10001]),
        (each_step(lambda step: replace(step, rates=[0.1, 0.1]), since=3), "rate", 3, [0.1, 0.1]),
    ],
    ids=["parameters", "a row twice", "rate", "groups"],
)
def test_the_first_difference_is_named(
    change: Callable[[ScriptRecord], ScriptRecord], question: str, step: int | None, found: object, tmp_path: Path
) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    edit(other, 0, change)
    results = diff(one, other)
    assert differing(results) == [question]
    first = results.first_divergence
    assert first and (first.step, first.found) == (step, found)


@pytest.mark.parametrize(("end", "wrong"), [(1.005, []), (1.02, ["weights"])])
def test_weights_that_end_elsewhere_are_within_a_hundredth_of_their_movement(
    end: float, wrong: list[str], tmp_path: Path
) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other", end=end)
    edit(other, 0, each_step(lambda step: replace(step, weights={name: -1 for name in NAMES}), since=STEPS - 1))
    results = diff(one, other)
    assert differing(results) == wrong
    if wrong:
        assert results.first_divergence and results.first_divergence.found == pytest.approx(0.02)


def test_weights_that_were_not_kept_are_unknown(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    (other / f"rank0.{END}.npz").unlink()
    edit(other, 0, each_step(lambda step: replace(step, weights={name: -1 for name in NAMES})))
    (found,) = [each for each in diff(one, other).findings if each.question == "weights"]
    assert found.answer == "unknown" and "were not kept" in found.sentence
