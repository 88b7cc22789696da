"""Ranks that Ray Train starts: the same step, continued too; a rank that fails is named, and no process is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from budget import wait_until
from command import DIGITS, JOBS, samestep
from launch.test_endings import assert_gone, training
from ranks import skip_unless_here

pytestmark = pytest.mark.check  # each starts a Ray cluster
RAY = ("--nproc", "2", "--device", "cpu")
BUDGET = 600  # of a command's imports: Ray's own processes import, too


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    skip_unless_here("ray")
    before = ray_processes()
    yield
    wait_until(lambda: ray_processes() <= before, "Ray's processes are still alive", ray_processes)


def ray_processes() -> set[int]:
    names = ("raylet", "gcs_server", "ray::")
    found = psutil.process_iter(["name", "cmdline"])
    return {p.pid for p in found if any(name in " ".join(p.info["cmdline"] or []) for name in names)}


def verdict(out: Path, *more: str) -> dict[str, object]:
    done = samestep("verify", *DIGITS, "--engines", "ray", *RAY, *more, "--json", out=out, imports=BUDGET)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["engines"]
    return dict(row)


def test_the_same_step(tmp_path: Path) -> None:
    row = verdict(tmp_path / "out")
    assert (row["launcher"], row["verdict"], row["bitwise"]) == ("ray", "same", True)


def test_a_continued_training_is_the_same(tmp_path: Path) -> None:
    assert verdict(tmp_path / "out", "--resume")["verdict"] == "same"


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    done = samestep("run", f"{JOBS}:raises_on_rank_1", "--engine", "ray", *RAY, out=tmp_path / "out", imports=BUDGET)
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "the data of step 3 is bad" in done.stderr, done.stderr


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", "ray", "--engine", "ray") as run:
        os.kill(run.parent.pid, signal.SIGKILL)
        assert_gone(run.pids)
