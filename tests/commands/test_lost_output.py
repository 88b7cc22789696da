"""Output that nobody reads, or that no disk takes: the training goes on, and its results are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from command import DIGITS, JOBS


def typed(*arguments: str, both: bool = True, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samestep", *arguments],
        stdout=out,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
        text=True,
    )


@pytest.mark.check
def test_a_training_whose_news_nobody_reads_goes_on(tmp_path: Path) -> None:
    """As `samestep run … 2>&1 | head -n 1`."""
    line = ["run", f"{JOBS}:quick", "--nproc", "2", "--launcher", "fork", "--out", str(tmp_path / "out")]
    command = typed(*line)
    assert command.stdout and command.stdout.readline()
    command.stdout.close()
    assert command.wait(budget()) == 0
    assert (tmp_path / "out" / "results.json").exists() and (tmp_path / "out" / "weights.safetensors").exists()


def test_a_table_of_which_only_the_head_is_read(tmp_path: Path) -> None:
    command = typed("eject", *DIGITS, both=False)
    assert command.stdout and command.stderr and command.stdout.readline()
    command.stdout.close()
    said = command.stderr.read()
    assert command.wait(budget()) == 0 and said.count("\n") == 1 and "samestep_ddp.py, digits.py" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_results_that_cannot_be_written_are_told() -> None:
    with open("/dev/full", "w") as full:
        command = typed("eject", *DIGITS, both=False, out=full.fileno())
        assert command.stderr and "No space left" in command.stderr.read()
        assert command.wait(budget()) != 0
