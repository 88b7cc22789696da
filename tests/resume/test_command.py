"""samestep verify --resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import DRAWN, samestep


def test_verify_interrupts_and_another_engine_continues(tmp_path: Path) -> None:
    """amp, which is inexact by design, may continue its own trainings alone."""
    given = ["verify", DRAWN, "--set", "rows=29", "--engines", "ddp,amp", "--nproc", "2"]
    done = samestep(*given, "--resume-nproc", "1", "--resume-engine", "single", "--json", out=tmp_path / "out")
    rows = {row["engine"]: row for row in json.loads(done.stdout)["engines"]}
    assert done.returncode == 0, done.stderr
    assert rows["ddp"]["verdict"] == "same"
    assert rows["ddp"]["continued_by"] == {"engine": "single", "replicas": 1}
    assert rows["amp"]["verdict"] == "refused"
    assert rows["amp"]["reason"]["id"] == "lossy_engine_continues_alone"
    folders = {path.name for path in (tmp_path / "out" / "launches").iterdir()}
    assert {"ddp-fork-0", "ddp-fork-0-continued"} == folders


@pytest.mark.check
def test_more_ranks_than_began_continue(tmp_path: Path) -> None:
    """The new rank has no part in what the first launch has recorded."""
    given = ["verify", DRAWN, "--set", "rows=29", "--engine", "ddp", "--nproc", "2"]
    done = samestep(
        *given, "--resume", "--resume-nproc", "3", "--resume-engine", "fsdp", "--json", out=tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["engines"]
    assert (row["engine"], row["replicas"], row["launcher"], row["verdict"]) == ("ddp", 2, "fork", "same")
    assert row["continued_by"] == {"engine": "fsdp", "replicas": 3}


@pytest.mark.check
def test_more_ranks_than_began_continue_what_is_inexact(tmp_path: Path) -> None:
    given = ["verify", DRAWN, "--set", "rows=29", "--engine", "amp", "--nproc", "2"]
    done = samestep(*given, "--resume", "--resume-nproc", "3", "--json", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["engines"]
    assert (row["engine"], row["replicas"], row["launcher"], row["verdict"]) == ("amp", 2, "fork", "approximate")
    assert row["continued_by"] == {"engine": "amp", "replicas": 3}


def test_other_ranks_are_checked() -> None:
    done = samestep("verify", DRAWN, "--resume-nproc", "0")
    assert done.returncode == 2
    assert "--resume-nproc 0: " in done.stderr
    assert "no such option" in samestep("compare", DRAWN, "--resume").stderr.lower()
