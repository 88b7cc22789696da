"""Ranks that Ray Train starts: the same step, continued too; a rank that fails is named, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
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
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test has started, Ray's own among them, has ended after it."""
    skip_unless_here("ray")
    monkeypatch.setenv("SAMESTEP_TEST", mark := str(time.time_ns()))
    yield
    wait_until(lambda: not marked(mark), "still alive", lambda: marked(mark))


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.environ().get("SAMESTEP_TEST") == mark else []
    return found


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
    assert "rank 1" in done.stderr and "3 is bad" in done.stderr, done.stderr


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", "ray", "--engine", "ray") as run:
        os.kill(run.parent.pid, signal.SIGKILL)
        assert_gone(run.pids)
