"""The fixture `same_training`: a script beside a git revision, and beside a stored record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from against.plant import committed
from planting import Edit, plant_in_files
from said import tells
from testing.runs import outcomes, run

QUICK = 'steps=3, options=["--launcher", "fork"]'
AGAINST = f'def test_training(same_training):\n    same_training("train.py", against="main", {QUICK})\n'
RECORD = f'def test_training(same_training):\n    same_training("train.py", record="records/train", {QUICK})\n'
CHANGED = [Edit("(0.9, 0.95)", "(0.9, 0.99)", "train.py")]
REFACTORED = [Edit("network = Classifier", "network = net = Classifier", "train.py")]


def tells_of_betas(printed: str) -> bool:
    """Whether CHANGED is named, with the new value."""
    return tells(printed, "optimizer_set_otherwise", name="betas") and tells(
        printed, "setting_is", name="betas", value=[0.9, 0.99]
    )


@pytest.mark.check
def test_beside_a_revision(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    plant_in_files(folder, REFACTORED)
    done = run(folder, AGAINST)
    assert outcomes(done) == {"passed": 1}, done.stdout
    plant_in_files(folder, CHANGED)
    done = run(folder, AGAINST)
    assert outcomes(done) == {"failed": 1} and tells_of_betas(done.stdout), done.stdout


@pytest.mark.check
def test_beside_a_stored_record(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    shutil.rmtree(folder / ".git")
    done = run(folder, RECORD)
    assert "1 failed" in done.stdout and "pytest --samestep-update writes it" in done.stdout, done.stdout
    assert "1 passed" in run(folder, RECORD, "--samestep-update").stdout
    plant_in_files(folder, REFACTORED)
    done = run(folder, RECORD)
    assert outcomes(done) == {"passed": 1}, done.stdout
    plant_in_files(folder, CHANGED)
    done = run(folder, RECORD)
    assert outcomes(done) == {"failed": 1} and tells_of_betas(done.stdout), done.stdout
    assert "1 passed" in run(folder, RECORD, "--samestep-update").stdout


def test_a_revision_or_a_record(tmp_path: Path) -> None:
    done = run(tmp_path, 'def test_training(same_training):\n    same_training("train.py")\n')
    assert "1 failed" in done.stdout and "takes one of against=REVISION and record=FOLDER" in done.stdout
