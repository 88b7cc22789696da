"""The fixture `same_training`: a script beside a git revision, and beside a stored record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from against.plant import committed
from planting import Edit, plant_in_files
from testing.runs import run

QUICK = 'steps=3, options=["--launcher", "fork"]'
AGAINST = f'def test_training(same_training):\n    same_training("train.py", against="main", {QUICK})\n'
RECORD = f'def test_training(same_training):\n    same_training("train.py", record="records/train", {QUICK})\n'
CHANGED = [Edit("(0.9, 0.95)", "(0.9, 0.99)", "train.py")]
REFACTORED = [Edit("network = Classifier", "network = net = Classifier", "train.py")]


@pytest.mark.check
def test_beside_a_revision(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    plant_in_files(folder, REFACTORED)
    done = run(folder, AGAINST)
    assert "1 passed" in done.stdout, done.stdout
    plant_in_files(folder, CHANGED)
    done = run(folder, AGAINST)
    assert "1 failed" in done.stdout and "betas = 0.9, 0.99" in done.stdout, done.stdout


@pytest.mark.check
def test_beside_a_stored_record(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    shutil.rmtree(folder / ".git")
    done = run(folder, RECORD)
    assert "1 failed" in done.stdout and "pytest --samestep-update writes it" in done.stdout, done.stdout
    assert "1 passed" in run(folder, RECORD, "--samestep-update").stdout
    plant_in_files(folder, REFACTORED)
    done = run(folder, RECORD)
    assert "1 passed" in done.stdout, done.stdout
    plant_in_files(folder, CHANGED)
    done = run(folder, RECORD)
    assert "1 failed" in done.stdout and "betas = 0.9, 0.99" in done.stdout, done.stdout
    assert "1 passed" in run(folder, RECORD, "--samestep-update").stdout


def test_a_revision_or_a_record(tmp_path: Path) -> None:
    done = run(tmp_path, 'def test_training(same_training):\n    same_training("train.py")\n')
    assert "1 failed" in done.stdout and "takes one of against=REVISION and record=FOLDER" in done.stdout
