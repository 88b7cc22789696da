"""What a training does where its results cannot be written: it goes on, says so once, and fails only at its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget import budget, wait_until
from command import TESTS

GATED = f"{TESTS}/jobs/gated.py:job"


class Gated:
    """A training of tests/jobs/gated.py, which waits in the middle and in its last step."""

    def __init__(self, out: Path, folder: Path, *options: str) -> None:
        self.out = out
        self.gates, self.said = folder / "gates", folder / "said.txt"
        self.gates.mkdir()
        line = [
            "run",
            GATED,
            "--engine",
            "ddp",
            "--nproc",
            "2",
            "--launcher",
            "fork",
            "--log",
            "csv",
            "--out",
            str(out),
        ]
        with open(self.said, "w") as said:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "samestep", *line, "--out", str(out), "--set", f"gates={self.gates}", *options],
                stdout=said,
                stderr=said,
            )

    def reaches(self, gate: str) -> None:
        wait_until(lambda: (self.gates / gate).exists() or self.command.poll() is not None, gate, self.said.read_text)
        assert self.command.poll() is None, self.said.read_text()

    def opens(self, gate: str) -> None:
        (self.gates / gate).touch()

    def says(self, words: str) -> None:
        wait_until(lambda: words in self.said.read_text(), f"not said: {words}", self.said.read_text)

    def ends(self) -> int:
        return self.command.wait(budget())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Fills a disk to its last byte."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return filler


def begun(out: Path, tmp_path: Path, disk: Path, *options: str) -> tuple[Gated, Path]:
    """A training in its last step, whose disk is full since its middle."""
    training = Gated(out, tmp_path, *options)
    training.reaches("half")
    filler = fill(disk)
    training.opens("filled")
    training.reaches("last")
    training.says(f"progress cannot be written: {out}: No space left on device; the training goes on")
    return training, filler


def test_a_full_disk_ends_no_training_before_its_weights(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    training, _ = begun(out, tmp_path, small_disk)
    training.opens("end")
    assert training.ends() == 2
    said = training.said.read_text()
    assert said.count("progress cannot be") == 1 and "Traceback" not in said, said
    last = said.splitlines()[-1]
    assert last.startswith("samestep: ") and str(small_disk) in last and "lost" in last, last
    assert not list(out.glob("*weights*"))  # nor a temporary file


@pytest.mark.check
def test_where_room_is_made_nothing_is_lost(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    training, filler = begun(out, tmp_path, small_disk)
    filler.unlink()
    training.opens("end")
    assert training.ends() == 0, training.said.read_text()
    assert (out / "weights.safetensors").exists()
    assert json.loads((out / "results.json").read_text())["steps"] == 8


def test_a_results_folder_that_is_removed_ends_no_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    training = Gated(out, tmp_path)
    training.reaches("half")
    shutil.rmtree(out)
    training.opens("filled")
    training.reaches("last")
    training.says(f"progress cannot be written: {out}: No such file or directory; the training goes on")
    training.opens("end")
    assert training.ends() == 0, training.said.read_text()
    assert (out / "weights.safetensors").exists()
    assert json.loads((out / "results.json").read_text())["steps"] == 8
