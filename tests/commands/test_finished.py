"""The same line once more: a training that has finished is told, and its results are returned."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands.test_runs import results_of
from said import refuses
from samestep.commands.results_folder import finished_results
from samestep.errors import UserError
from samestep.records.checkpoint import FOLDER
from samestep.records.files import write
from samestep.records.plan import RunTask
from samestep.records.results import write_results
from samestep.records.runs import COMMAND, CommandRecord

LINE = ("samestep", "run", "digits", "--resume", "runs/first")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a training that has finished."""
    (tmp_path / "weights.safetensors").touch()
    (tmp_path / FOLDER).mkdir()
    write_results(results_of(None), tmp_path)
    write(tmp_path / COMMAND, CommandRecord(LINE, "/", time.time(), "finished"))
    return tmp_path


@pytest.mark.parametrize("stopped", [None, "early"])
def test_what_has_ended_is_returned(stopped: str | None, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(results_of(stopped), out)
    results = finished_results(out, RunTask(""), LINE)
    assert results and results.stopped == stopped
    assert "already finished" in capsys.readouterr().err


def test_what_was_stopped_is_continued(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(results_of("requested"), out)
    assert finished_results(out, RunTask(""), LINE) is None
    (out / "results.json").unlink()  # killed
    assert finished_results(out, RunTask(""), LINE) is None
    assert not capsys.readouterr().err


def test_only_the_same_line_continues_from_a_named_checkpoint(out: Path) -> None:
    assert finished_results(out, RunTask("", resume="runs/first"), LINE)
    with pytest.raises(UserError, match="would replace"):
        finished_results(out, RunTask("", resume="runs/other"), (*LINE[:-1], "runs/other"))


@pytest.mark.parametrize(
    ("folder", "is_free"),
    [
        ("run", False),
        ("", False),
        ("run/checkpoints/hub", False),
        ("run/rank-0", False),
        ("run/hub", True),
        ("hub", True),
    ],
)
def test_an_export_in_the_place_of_the_results_is_refused(folder: str, is_free: bool, tmp_path: Path) -> None:
    """Before the training: the folder has the results' files when it ends."""
    training = RunTask("", export=str(tmp_path / folder))
    if is_free:
        assert finished_results(tmp_path / "run", training, LINE) is None
    else:
        with refuses("export_is_place_of_results"):
            finished_results(tmp_path / "run", training, LINE)


def test_what_would_be_replaced_is_kept(out: Path) -> None:
    with pytest.raises(UserError, match="would replace"):
        finished_results(out, RunTask("", resume="never"), LINE)
    with refuses("export_is_place_of_results"):
        finished_results(out, RunTask("", export=str(out)), LINE)  # this training has not written it
    (out / "hub").mkdir()
    (out / "hub" / "other").touch()
    with pytest.raises(UserError, match="would be replaced"):
        finished_results(out, RunTask("", export=f"{out}/hub"), LINE)
    write_results(replace(results_of(None), export=str(out)), out)
    assert finished_results(out, RunTask("", export=str(out)), LINE)
    with pytest.raises(UserError, match="would replace"):
        finished_results(out, RunTask("", export=f"{out}/new"), LINE)  # it could not be written any more
    (out / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="checkpoints"):
        finished_results(out, RunTask("", resume="never"), LINE)
