"""Records are written whole or not at all, one schema reads them, and the first error is the one that is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from full_disk import fill
from samestep.errors import TrainingFailed, UserError
from samestep.message import as_said
from samestep.records.files import OLDEST, SCHEMA, _adapter, as_json, finite, from_json, read, write, write_json
from samestep.records.inspection import MachineFacts
from samestep.records.plan import MeasureTask, Plan, ProveTask
from samestep.records.record import Progress, RankError, RankRecord, Record, read_progress, write_progress
from samestep.records.results import Launch
from samestep.records.tensor_files import write_arrays
from samestep.records.training_record import MicroBatchRecord, TrainingRecord
from samestep.world import World

MACHINE = MachineFacts("3.11", "2.13", "h1", "x86_64", 2)
PARTS = [MicroBatchRecord(0, 1, 2, [5, 3], 2.0, ["ab", "cd"])]


def _rank(folder: Path, rank: int) -> RankRecord:
    trainings = {"sgd": TrainingRecord(losses=[float(rank), float("inf")], micro_batches=PARTS, later={2: [1, 0]})}
    record = RankRecord(rank, World(rank=rank, size=11), 1, 0.5, MACHINE, trainings)
    write(folder / f"rank{rank}.json", record)
    return record


def test_round_trip(tmp_path: Path) -> None:
    written = [_rank(tmp_path, rank) for rank in (10, 1, 0)]
    write_arrays(tmp_path / "rank0.sgd.npz", {"file": np.arange(3.0), "a.weight": np.eye(2)})
    record = Record(tmp_path)
    assert record.ranks == written[::-1]
    assert [seen.losses[0] for seen in record.training("sgd")] == [0, 1, 10]
    assert set(record.arrays("sgd")) == {"file", "a.weight"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_plan_keeps_the_kinds_of_its_trainings(tmp_path: Path) -> None:
    proof = ProveTask("sgd", 8, "float64", 2, 0.05, {"wrap": "root"}, "sgd")
    plan = Plan(str(tmp_path), 1.5, "digits", {"lr": "0.1"}, "fsdp", {"reshard": False}, (MeasureTask(20), proof))
    write(tmp_path / "plan.json", plan)
    assert Record(tmp_path).plan() == plan


def test_a_record_holds_no_bare_nan(tmp_path: Path) -> None:
    """JSON has none, and programs that read progress.json fail at it."""
    curve = [{"step": 1.0, "loss": float("nan"), "error": float("-inf")}]
    write_progress(0, tmp_path, Progress("run", 0, 1, 2, 3, float("inf"), curve))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((tmp_path / "progress.json").read_text(), parse_constant=refuse)
    assert repr(read_progress(tmp_path)) == repr(Progress("run", 0, 1, 2, 3, float("inf"), curve))


def test_complete_needs_all_ranks_in_this_schema(tmp_path: Path) -> None:
    _rank(tmp_path, 0)
    assert not Record(tmp_path).complete(2)
    _rank(tmp_path, 1)
    assert Record(tmp_path).complete(2)
    other = json.loads((tmp_path / "rank1.json").read_text()) | {"schema": SCHEMA + 1}
    write_json(tmp_path / "rank1.json", other)
    assert not Record(tmp_path).complete(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": OLDEST - 1}, f"was written by an older samestep (schema {OLDEST - 1}, this one has {SCHEMA})"),
        ({"schema": SCHEMA + 1}, f"was written by a newer samestep (schema {SCHEMA + 1}, this one has {SCHEMA})"),
        ({"schema": None}, "was written by an older samestep"),
        ({"shaken": 3}, "was written by another version of samestep: shaken: Unexpected keyword argument"),
        ({"activity": 3}, "is not as samestep writes it: activity: Input should be a valid string"),
    ],
)
def test_a_file_of_another_schema_is_refused_in_one_sentence(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path / "progress.json", Progress("run", done=3))
    assert read_progress(tmp_path) == Progress("run", done=3)
    written = json.loads((tmp_path / "progress.json").read_text())
    write_json(tmp_path / "progress.json", written | change)
    with pytest.raises(UserError) as refused:
        read_progress(tmp_path)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("machine", "says"), [({"gpu_name": "a"}, "machine.gpu_name: Un"), ({}, "machine.python: F")])
def test_a_nested_record_of_another_layout_is_refused_too(machine: dict[str, str], says: str) -> None:
    plain = as_json(RankRecord(0, World(), 1, 0.0, MACHINE))
    other = plain | {"machine": plain["machine"] | machine if machine else {}}
    with pytest.raises(UserError, match=f"another version.*: {says}"):
        from_json(RankRecord, other)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(UserError, match="read as JSON"):
        read(Progress, tmp_path / "progress.json")


@pytest.mark.parametrize("content", ["", '{"schema": 2, "rank"', "[1]"])
def test_a_record_that_is_cut_off_is_named(content: str, tmp_path: Path) -> None:
    _rank(tmp_path, 0)
    for name in ("rank0.json", "plan.json", "error-rank0.json", "rank0.sgd.npz"):
        (tmp_path / name).write_text(content)
    record = Record(tmp_path)
    assert not record.complete(1)  # a resumed study launches it again
    reads = {"rank0.json": lambda: record.ranks, "plan.json": record.plan, "error-rank0.json": record.error}
    for name, reading in {**reads, "rank0.sgd.npz": lambda: record.arrays("sgd")}.items():
        with pytest.raises((UserError, TrainingFailed)) as error:
            reading()
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_are_cut_off_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sgd.npz"
    write_arrays(path, {"a": np.arange(100.0)})
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 8):
        path.write_bytes(whole[:length])
        with pytest.raises(TrainingFailed, match=r"rank0\.sgd\.npz is missing"):
            Record(tmp_path).arrays("sgd")


def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    fill(monkeypatch, "a.json")
    with pytest.raises(OSError, match="No space left") as error:
        write_json(path, {"new": 1})
    assert error.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and json.loads(path.read_text()) == {"old": 1}


def test_results_with_no_finite_loss_are_read_back() -> None:
    """As JSON has them, without NaN."""
    losses = [1.5, math.inf, -math.inf]
    launch = Launch(0, 1.0, [1.0], [0.0], [*losses, math.nan])
    written = json.dumps(finite(as_json(launch)), allow_nan=False)
    found = from_json(Launch, json.loads(written))
    assert found.losses[:3] == losses and math.isnan(found.losses[3])


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}


def test_plain_values_describe_a_record() -> None:
    assert from_json(RankRecord, as_json(_plain := RankRecord(0, World(), 1, 0.0, MACHINE))) == _plain
    assert finite({"a": [float("nan"), 1.0]}) == {"a": ["NaN", 1.0]}


def test_the_first_error_is_told(tmp_path: Path) -> None:
    """A rank that lost its peer is not the cause, however early it noticed."""
    errors = [
        RankError(rank, "crash", as_said(f"error {rank}"), at, "", lost)
        for rank, at, lost in ((0, 5.0, False), (1, 4.0, True), (2, 6.0, False))
    ]
    for error in errors:
        write(tmp_path / f"error-rank{error.rank}.json", error)
    assert Record(tmp_path).error() == errors[0]
    assert Record(tmp_path / "empty").error() is None


def test_a_record_of_many_wrong_values_is_refused_at_the_first(tmp_path: Path) -> None:
    """pydantic would keep each: 4 GB for a file of 5 MB."""
    curve = {"activity": "run", "curve": [1] * 100_000}
    with pytest.raises(ValidationError) as raised:
        _adapter(Progress).validate_python(curve)
    assert raised.value.error_count() == 1
    for value, says in ((curve, "curve.0"), ({str(number): 0 for number in range(3000)}, "3,000 of its values")):
        with pytest.raises(UserError, match=says):
            from_json(Progress, value)
    assert from_json(Progress, {"curve": [{"step": 1.0, "loss": 0.5}]}).curve[0]["loss"] == 0.5
