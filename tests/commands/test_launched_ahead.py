"""Ranks that train while the reference is played: one launch, of what the reference says, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from budget import budget, deadline, wait_until
from command import DIGITS, JOBS, TESTS, samestep
from lane_marks import CHECK, FULL
from samestep.commands import compare
from samestep.commands.command_options import VerifyOptions
from samestep.commands.launch_ahead import LaunchAhead, has_cores_for
from samestep.commands.proof_launches import trains_the_same
from samestep.errors import TrainingFailed
from samestep.launch.fork_client import SOCKETS
from samestep.message import as_said
from samestep.proof.plan import QUICK
from samestep.records.files import read, write
from samestep.records.plan import SGD_LR, Plan, ProveTask, ReferencePlan
from samestep.records.record import Record
from samestep.world.processes import COMMAND

two_cores = pytest.mark.skipif(  # CI has them
    not has_cores_for(2) and "CI" not in os.environ, reason="a core for the reference and one for the ranks"
)
THREADS = ("--engine", "ddp", "--nproc", "3", "--as", "threads", "--quick")
ENDS_TOO_HIGH = f"{TESTS}/conformance/jobs_odd.py:large_targets"


def plan(tmp_path: Path, rate: float = SGD_LR) -> Plan:
    tasks = tuple(ProveTask(name, 8, "float64", 2, rate) for name in QUICK)
    return Plan(str(tmp_path), 1.0, "digits", {}, "ddp", {}, tasks, 1, 2, 1)


def verify(*arguments: str, out: Path) -> Any:
    return samestep("verify", *arguments, *THREADS, *deadline(), "--json", out=out, cwd=out.parent)


def launch_of(out: Path) -> tuple[Plan, ReferencePlan]:
    return read(Plan, out / "launches/ddp-threads-0/plan.json"), read(ReferencePlan, out / "reference/plan.json")


@two_cores
def test_ranks_begin_before_the_reference_has_ended(tmp_path: Path) -> None:
    done = verify(*DIGITS, out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["engines"]
    assert row["verdict"] == "same" and row["launcher"] == "threads"
    ranks, _ = launch_of(tmp_path / "out")
    assert ranks.started_at < (tmp_path / "out/reference/rank0.json").stat().st_mtime


@pytest.mark.check
def test_forked_ranks_do_so_where_each_has_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(compare, "has_cores_for", lambda processes: asked.append(processes) or True)
    options = VerifyOptions(engines=("ddp",), nproc=2, quick=True, out=tmp_path / "out", settings={"width": 16})
    results = compare.compare_engines("verify", options, "digits")
    assert results and [row.verdict for row in results.engines] == ["same"]
    ranks = read(Plan, tmp_path / "out/launches/ddp-fork-0/plan.json")
    assert asked == [3]
    assert ranks.started_at < (tmp_path / "out/reference/rank0.json").stat().st_mtime


@two_cores
@pytest.mark.check
def test_of_another_learning_rate_than_the_first_they_begin_again(tmp_path: Path) -> None:
    done = verify(ENDS_TOO_HIGH, out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    ranks, _ = launch_of(tmp_path / "out")
    rates = {training.sgd_lr for training in ranks.trainings if isinstance(training, ProveTask)}
    assert rates and SGD_LR not in rates
    assert ranks.started_at > (tmp_path / "out/reference/rank0.json").stat().st_mtime


@two_cores
@pytest.mark.parametrize(
    ("job", "code"), [("unseeded", 2), pytest.param("raises_on_rank_1", 1, marks=CHECK)], ids=["reference", "ranks"]
)
def test_an_error_of_either_ends_both(job: str, code: int, tmp_path: Path) -> None:
    done = verify(f"{JOBS}:{job}", out=tmp_path / "out")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and not left_in(tmp_path / "out")
    if code == 1:
        (row,) = json.loads(done.stdout)["engines"]
        assert row["verdict"] == "failed"


@two_cores
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=FULL), pytest.param(signal.SIGKILL, marks=CHECK)])
def test_what_ends_the_command_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [sys.executable, "-m", "samestep", "verify", "charlm", "--set", f"data={__file__}", "--set", "length=16"]
    with open(tmp_path / "said", "wb") as said:
        command = subprocess.Popen(
            [*line, *THREADS, "--set", "layers=24", "--out", str(out)],
            stdout=said,
            stderr=said,
            env={name: value for name, value in os.environ.items() if name != SOCKETS},  # with servers of its own
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    both = [out / "reference/pid-rank0", out / "launches/ddp-threads-0/pid-rank2"]
    try:
        wait_until(lambda: all(path.exists() for path in both), "they have not begun", (tmp_path / "said").read_text)
        started = {process.pid for process in psutil.process_iter() if started_by(process, command.pid)}
        assert len(started) >= 2 and command.poll() is None
        command.send_signal(number)
        assert command.wait(budget()) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, started)), "a process is left")
    finally:
        command.kill()


def started_by(process: psutil.Process, pid: int) -> bool:
    try:
        return process.environ().get(COMMAND, "").startswith(f"{pid}@")
    except psutil.Error:
        return False


def left_in(out: Path) -> list[int]:
    """The ranks of a command that still live."""
    pids = {int(path.read_text().partition("@")[0]) for path in out.rglob("pid-rank*")}
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_record_serves_the_trainings_that_it_is_of(tmp_path: Path) -> None:
    write(tmp_path / "plan.json", plan(tmp_path))
    assert trains_the_same(tmp_path, replace(plan(tmp_path), started_at=2.0))
    assert not trains_the_same(tmp_path, plan(tmp_path, rate=SGD_LR / 4))


def ahead(tmp_path: Path, start: Callable[[Plan, Callable[[str], None]], Record]) -> LaunchAhead:
    return LaunchAhead(plan(tmp_path), start)


def test_a_launch_is_of_one_plan_and_returns_its_record_or_its_error(tmp_path: Path) -> None:
    shown: list[str] = []

    def start(begun: Plan, show: Callable[[str], None]) -> Record:
        if begun.trainings == ():
            raise TrainingFailed(as_said("no"))
        return Record(tmp_path)

    launch = ahead(tmp_path, start)
    assert launch.record(shown.append) == Record(tmp_path)
    assert launch.is_of(replace(plan(tmp_path), started_at=3.0)) and not launch.is_of(plan(tmp_path, rate=1.0))
    launch.close()
    failing = LaunchAhead(replace(plan(tmp_path), trainings=()), start)
    with pytest.raises(TrainingFailed, match="no"):
        failing.record(shown.append)
    failing.close()


def test_a_launch_that_nobody_waits_for_ends_when_it_is_closed(tmp_path: Path) -> None:
    ended: list[str] = []

    def start(begun: Plan, show: Callable[[str], None]) -> Record:
        try:
            while True:
                show("a step")
        finally:
            ended.append("tree")

    ahead(tmp_path, start).close()
    assert ended == ["tree"]


def test_a_core_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr("samestep.world.resources.cpu_limit", lambda: None)
    assert has_cores_for(3) and not has_cores_for(4)
    monkeypatch.setattr("samestep.world.resources.cpu_limit", lambda: 1.5)
    assert has_cores_for(1) and not has_cores_for(2)
