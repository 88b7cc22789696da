"""`samestep diff`, on records that are made up: what it names, and how close is close enough. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from judge.test_script import NAMES, STEPS, finding_of, judged
from samestep.commands.judge_records import diff
from samestep.errors import UserError
from samestep.message import message
from samestep.records.call_site import ChangedLines
from samestep.records.files import read, write
from samestep.records.findings import DiffResults, question_of
from samestep.records.script import STEP, ScriptRecord, StepRecord, UntrainedRecord
from samestep.records.script_plan import END, PLAN, START, ScriptPlan
from samestep.records.tensor_files import read_arrays, write_arrays
from samestep.report.check import show_diff


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


def each_step(change: Callable[[StepRecord], StepRecord], since: int = 0) -> Callable[[ScriptRecord], ScriptRecord]:
    """Changes the steps of a record, from number `since` on."""
    return lambda record: replace(record, steps=[*record.steps[:since], *map(change, record.steps[since:])])


def differing(results: DiffResults) -> list[str]:
    return [finding.question for finding in results.findings if finding.answer == "differs"]


def test_records_are_compared_as_far_as_every_rank_has_come(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    edit(other, 1, lambda record: replace(record, steps=record.steps[:2]))
    results = diff(one, other)
    assert (results.answer, results.steps) == ("right", 2), results.findings
    shorter = message("as_many_as_both_have")
    assert results.findings[0].message == message("steps_are_compared", steps=2, shorter=shorter, since=None)


def test_other_files_beside_the_records_are_none(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    for name in ("rank0x.json", "rank1\u00b2.json", "rank01.json"):
        (other / name).write_text("{}")
    assert diff(one, other).answer == "right"


def test_gradients_that_are_not_finite_are_not_the_same(tmp_path: Path) -> None:
    results = diff(recorded(tmp_path / "one", "not finite"), recorded(tmp_path / "other", "not finite"))
    assert results.answer == "unknown"
    assert finding_of(results, "gradient").message == message("compared_gradient_not_finite", step=0)


def other_name(record: ScriptRecord) -> ScriptRecord:
    return replace(record, start={**record.start, "c.weight": 1})


def row_twice(step: StepRecord) -> StepRecord:
    (batch,) = step.micro_batches
    return replace(step, micro_batches=[replace(batch, rows=[*batch.rows, batch.rows[0]])])


@pytest.mark.parametrize(
    ("change", "question", "step", "found"),
    [
        (other_name, "initial weights", None, 5),
        (each_step(row_twice, since=1), "rows", 1, message("rows_of_which_expected", rows=7, expected=6)),
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


@pytest.mark.parametrize(("loss", "question"), [(2.0, "gradient"), (2.000002, "gradient"), (2.0001, "loss")])
def test_a_loss_that_is_hardly_another_one_tells_why_the_gradient_is(
    loss: float, question: str, tmp_path: Path
) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    for folder, value in ((one, 2.0), (other, loss)):
        for rank in range(2):
            edit(folder, rank, each_step(lambda step, value=value: with_loss(step, value)))
    for rank in range(2):
        arrays = read_arrays(other, rank, "step0")
        write_arrays(other / f"rank{rank}.step0.npz", {name: value * 1.1 for name, value in arrays.items()})
    assert differing(diff(one, other))[0] == question


@pytest.mark.parametrize(
    ("called", "early", "question"),
    [(True, [], "frozen weights"), (True, ["teacher"], "loss"), (False, [], "loss")],
    ids=["a teacher", "after the losses", "an average that no forward uses"],
)
def test_a_teacher_that_is_another_one_comes_before_the_loss(
    called: bool, early: list[str], question: str, tmp_path: Path
) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    held = {"teacher.a.weight": UntrainedRecord("frozen", "teacher", start=9, called=called)}
    for folder, digest in ((one, 7), (other, 8)):
        for rank in range(2):
            edit(folder, rank, lambda record: replace(record, untrained=held))
            changed = {"changed": {"teacher.a.weight": digest}, "early": early}
            edit(folder, rank, each_step(lambda step, changed=changed: replace(step, **changed), since=1))
            edit(folder, rank, each_step(lambda step: with_loss(step, 2.0)))
            edit(folder, rank, each_step(lambda step, value=digest: with_loss(step, value), since=1))
    for rank in range(2):
        arrays = read_arrays(other, rank, "step1")
        write_arrays(other / f"rank{rank}.step1.npz", {name: value * 1.1 for name, value in arrays.items()})
    results = diff(one, other)
    assert {"frozen weights", "loss", "gradient"} <= {*differing(results)}
    assert question_of(results) == question and results.first_divergence and results.first_divergence.step == 1


@pytest.mark.parametrize(("factor", "shown"), [(1.0, False), (1 + 1e-6, True)], ids=["same bits", "within rounding"])
def test_changed_lines_are_shown_where_the_steps_are_the_same_within_rounding(
    factor: float, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    for rank in range(2):
        arrays = read_arrays(other, rank, "step0")
        write_arrays(other / f"rank{rank}.step0.npz", {name: value * factor for name, value in arrays.items()})
    place = ChangedLines("model.py", "model.py", 3, "-softcap = 15\n+softcap = 20")
    results = replace(diff(one, other), changes=[place])
    assert results.answer == "right"
    show_diff(results)
    assert ("+softcap = 20" in capsys.readouterr().out) == shown


def with_loss(step: StepRecord, value: float) -> StepRecord:
    return replace(step, micro_batches=[replace(batch, value=value) for batch in step.micro_batches])


@pytest.mark.parametrize(("moves", "stays"), [(False, ["average"]), (True, None)])
def test_an_average_that_no_recorded_step_moves_is_said_not_to_be_compared(
    moves: bool, stays: list[str] | None, tmp_path: Path
) -> None:
    folders = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    held = {"average.a.weight": UntrainedRecord("frozen", "average", start=1)}
    for folder in folders:
        for rank in range(2):
            edit(folder, rank, lambda record: replace(record, untrained=held))
            if moves:
                edit(folder, rank, each_step(lambda step: replace(step, changed={"average.a.weight": 7}), since=1))
    said = finding_of(diff(*folders), "frozen weights").message
    assert said == message("averages_are_the_same", networks=stays)


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
    found = finding_of(diff(one, other), "weights")
    assert (found.answer, found.message) == ("unknown", message("weights_not_kept"))


SINCE = 2  # steps before the checkpoint; an epoch has three


def interrupted(folder: Path) -> tuple[Path, Path]:
    """The record of a run, and that of its continuation from a checkpoint."""
    one, other = recorded(folder / "one"), recorded(folder / "other")
    for rank in range(2):
        edit(one, rank, in_epochs)
        whole = read(ScriptRecord, one / f"rank{rank}.json")
        goes_on = {name: value for name, value in whole.steps[SINCE - 1].weights.items()}
        edit(other, rank, lambda _, whole=whole, start=goes_on: replace(whole, start=start, steps=whole.steps[SINCE:]))
        for step in range(STEPS - SINCE):
            write_arrays(other / f"rank{rank}.step{step}.npz", read_arrays(one, rank, f"step{SINCE + step}"))
    return one, other


def in_epochs(record: ScriptRecord) -> ScriptRecord:
    """Gives a record two passes over its loader, of three steps each, and rates and first weights of its own."""
    steps = [
        replace(step, rates=[0.1 + i], micro_batches=[replace(micro, passes=[i // 3]) for micro in step.micro_batches])
        for i, step in enumerate(record.steps)
    ]
    return replace(
        record, start={name: 99 for name in NAMES}, steps=steps, passes=[*record.passes, replace(record.passes[0])]
    )


def rows_of_step(number: int) -> Callable[[ScriptRecord], ScriptRecord]:
    """Gives a resumed record's first step the rows of another step of the first run."""

    def change(record: ScriptRecord) -> ScriptRecord:
        first, *rest = record.steps
        micro = [
            replace(each, rows=[f"{record.rank} {number} 0 {i}" for i in range(3)]) for each in first.micro_batches
        ]
        return replace(record, steps=[replace(first, micro_batches=micro), *rest])

    return change


def test_a_resumed_run_that_goes_on_is_right(tmp_path: Path) -> None:
    results = diff(*interrupted(tmp_path), resumed_at=SINCE)
    assert (results.answer, results.steps) == ("right", STEPS - SINCE), results.findings
    assert results.findings[0].message.fields["since"] == 2


@pytest.mark.parametrize(
    ("change", "question", "step", "cause"),
    [
        (lambda r: replace(r, start={name: 99 for name in NAMES}), "initial weights", None, "no_checkpoint_was_loaded"),
        (
            lambda r: replace(r, start={name: 0 for name in NAMES}),
            "initial weights",
            None,
            "weights_of_another_step",
        ),
        (lambda r: replace(r, start={**r.start, "a.bias": 7}), "initial weights", None, "weights_not_restored"),
        (rows_of_step(0), "rows", 2, "epoch_begins_anew"),
        (rows_of_step(1), "rows", 2, "batch_trained_again"),
        (rows_of_step(3), "rows", 2, "batch_read_too_early"),
        (rows_of_step(8), "rows", 2, "epochs_order_not_restored"),
        (each_step(lambda step: replace(step, rates=[0.1])), "rate", 2, "rate_begins_anew"),
        (each_step(lambda step: replace(step, rates=[step.rates[0] - 1])), "rate", 2, "schedule_one_step_behind"),
        (
            each_step(lambda step: replace(step, weights={n: -1 for n in NAMES})),
            "weights",
            2,
            "optimizer_state_not_restored",
        ),
    ],
    ids=["anew", "older", "a part", "epoch anew", "again", "early", "others", "rate", "behind", "moments"],
)
def test_what_a_resumed_run_has_lost_is_named(
    change: Callable[[ScriptRecord], ScriptRecord], question: str, step: int | None, cause: str, tmp_path: Path
) -> None:
    one, other = interrupted(tmp_path)
    for rank in range(2):
        edit(other, rank, change)
    results = diff(one, other, resumed_at=SINCE)
    assert differing(results) == [question], results.findings
    first = results.first_divergence
    assert first and first.step == step and first.cause.id == cause


def test_the_order_of_an_earlier_epoch_is_named(tmp_path: Path) -> None:
    one, other = interrupted(tmp_path)
    for rank in range(2):
        edit(other, rank, lambda record: replace(record, start={name: 2 for name in NAMES}, steps=record.steps[1:]))
        write_arrays(other / f"rank{rank}.step0.npz", read_arrays(other, rank, "step1"))
        edit(other, rank, rows_of_step(0))
    first = diff(one, other, resumed_at=3).first_divergence
    assert first and (first.step, first.cause.id) == (3, "order_of_another_epoch")
    assert (first.cause.fields["found"], first.cause.fields["expected"]) == (0, 1)


def test_a_checkpoint_after_the_last_recorded_step_is_one_sentence(tmp_path: Path) -> None:
    one, other = interrupted(tmp_path)
    with pytest.raises(UserError, match="has 4 steps"):
        diff(one, other, resumed_at=STEPS)


def as_stages(folder: Path) -> Path:
    """A folder in which rank 1 holds other weights than rank 0."""
    edit(folder, 1, lambda record: replace(record, start={name: digest + 7 for name, digest in record.start.items()}))
    return folder


def test_ranks_that_hold_parts_of_the_model_are_compared_one_by_one(tmp_path: Path) -> None:
    one, other = as_stages(recorded(tmp_path / "one")), as_stages(recorded(tmp_path / "other"))
    same = diff(one, other)
    assert same.answer == "right" and finding_of(same, "gradient").message.id == "each_part_answers", same.findings
    name = STEP.format(1)
    arrays = {key: 1.01 * array for key, array in read_arrays(other, 1, name).items()}
    write_arrays(other / f"rank1.{name}.npz", arrays)
    results = diff(one, other)
    first = results.first_divergence
    assert results.answer == "differs" and first and (first.step, first.rank, first.quantity) == (1, 1, "gradient")


def test_a_later_stage_of_a_pipeline_has_no_rows_of_its_own(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one"), recorded(tmp_path / "other")
    for folder in (one, other):
        edit(folder, 1, lambda record: replace(record, start={"later": 1}))
    edit(other, 1, each_step(row_twice))
    assert "rows" not in differing(diff(one, other))
    edit(other, 0, each_step(row_twice))
    assert "rows" in differing(diff(one, other))


def test_parts_on_another_number_of_ranks_are_not_compared(tmp_path: Path) -> None:
    one, other = as_stages(recorded(tmp_path / "one")), recorded(tmp_path / "other")
    (other / "rank1.json").unlink()
    edit(other, 0, lambda record: replace(record, size=1))
    results = diff(one, other)
    assert results.answer == "unknown" and results.findings[0].message.id == "parts_on_other_ranks"
