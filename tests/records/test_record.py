"""Files appear whole or not at all, and the first error is the one that is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from samestep.records.record import SCHEMA, Record, write_arrays, write_json


def _rank(folder: Path, rank: int, **more: object) -> None:
    write_json(
        folder / f"rank{rank}.json", {"schema": SCHEMA, "rank": rank, "trainings": {"sgd": {"at": rank}}, **more}
    )


def test_round_trip(tmp_path: Path) -> None:
    for rank in (1, 0, 10):
        _rank(tmp_path, rank)
    write_arrays(tmp_path / "rank0.sgd.npz", {"file": np.arange(3.0), "a.weight": np.eye(2)})
    record = Record(tmp_path)
    assert record.training("sgd") == [{"at": 0}, {"at": 1}, {"at": 10}]
    assert set(record.arrays("sgd")) == {"file", "a.weight"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_complete_needs_all_ranks_in_this_schema(tmp_path: Path) -> None:
    _rank(tmp_path, 0)
    assert not Record(tmp_path).complete(2)
    _rank(tmp_path, 1)
    assert Record(tmp_path).complete(2)
    _rank(tmp_path, 1, schema=SCHEMA + 1)
    assert not Record(tmp_path).complete(2)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}


def test_the_first_error_is_told(tmp_path: Path) -> None:
    """A rank that lost its peer is not the cause, however early it noticed."""
    errors = [{"rank": rank, "time": at, "lost_peer": lost} for rank, at, lost in ((0, 5.0, False), (1, 4.0, True))]
    errors.append({"rank": 2, "time": 6.0, "lost_peer": False})
    for error in errors:
        (tmp_path / f"error-rank{error['rank']}.json").write_text(json.dumps(error))
    assert Record(tmp_path).error() == errors[0]
    assert Record(tmp_path / "empty").error() is None
