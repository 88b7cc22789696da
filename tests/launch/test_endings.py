"""However a launch ends, all that it started has ended: killed ranks, launchers, parents, Ctrl-C, errors, hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import psutil
import pytest

from budget import budget, deadline, wait_until
from command import JOBS, failure, has_begun, samestep
from foreign_folder import assert_none_ran, foreign_folder
from lane_marks import CHECK, FULL
from launch.jobs import NORMAL_EXIT

OTHERS = ["spawn", "mpirun"] if which("mpirun") or "CI" in os.environ else ["spawn"]
ENGINES = ["ddp", *(pytest.param(name, marks=pytest.mark.check) for name in ("lightning", "deepspeed", "accelerate"))]
ENGINES.append("single")


def on_launchers(*checked: str) -> list[object]:
    """Every launcher: these in `make check`, the others in `make full`."""
    return [pytest.param(name, marks=CHECK if name in checked else FULL) for name in ("torchrun", *OTHERS)]


@dataclass
class Command:
    """A `samestep` that runs. pids: of all that it has started. log: what it says."""

    parent: subprocess.Popen[bytes]
    log: Path
    pids: list[int]

    def said(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        """Waits for its end; returns its exit code."""
        return self.parent.wait(budget())


def as_in_a_terminal() -> None:
    """Takes what a job in the background, or under nohup, ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def training(job: str, out: Path, launcher: str, *more: str) -> Iterator[Command]:
    """A real `samestep run` on two ranks that has begun to train, in a foreign folder."""
    line = [sys.executable, "-m", "samestep", "run", f"{JOBS}:{job}", "--nproc", "2", "--launcher", launcher]
    log = out.with_name("said.txt")
    with open(log, "wb") as said:
        parent = subprocess.Popen(
            [*line, "--out", str(out), *more],
            cwd=foreign_folder(out.parent),
            stderr=said,
            preexec_fn=as_in_a_terminal,
        )
    run = Command(parent, log, [])
    try:
        wait_until(lambda: has_begun(out) or parent.poll() is not None, "it did not begin to train", run.said)
        assert parent.poll() is None, run.said()
        assert_none_ran(out.parent / "foreign")
        children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        run.pids += {*children, *map(pid_of, out.glob("pid-rank*"))}  # forked ranks are another process's children
        yield run
    finally:
        for pid in [*run.pids, parent.pid]:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        parent.wait()


def pid_of(path: Path) -> int:
    return int(path.read_text().partition("@")[0])


def alive(pids: list[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_gone(pids: list[int]) -> None:
    assert pids
    wait_until(lambda: not alive(pids), "still alive", lambda: alive(pids))


@pytest.mark.parametrize("launcher", on_launchers("torchrun", "spawn"))
def test_a_command_killed_while_its_ranks_still_import(launcher: str, tmp_path: Path) -> None:
    """Before a rank can tie itself to its parent, that parent may have gone."""
    command = [sys.executable, "-m", "samestep", "run", "digits", "--nproc", "2", "--launcher", launcher]
    parent = subprocess.Popen([*command, "--out", str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    pids: list[int] = []

    def launched() -> list[int]:
        """The launcher and two ranks, once they are there."""
        found = []
        for process in psutil.Process(parent.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                found += [process.pid] if "plan.json" in line or "spawn_main" in line else []
        return found if len(found) >= 3 else []

    try:
        pids += wait_until(launched, "no launcher with two ranks")
        parent.kill()
        parent.wait()
        assert_gone(pids)
    finally:
        parent.kill()
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", ["torchrun", *on_launchers("mpirun")[1:]])
def test_a_killed_rank(launcher: str, tmp_path: Path) -> None:
    """What it had started ends, too."""
    with training("with_a_child", tmp_path / "out", launcher) as run:
        (rank,) = [pid for pid in run.pids if pid == pid_of(tmp_path / "out" / "pid-rank1")]
        children = [child.pid for child in psutil.Process(rank).children()]
        assert [psutil.Process(pid).name() for pid in children] == ["sleep"]
        os.kill(rank, signal.SIGKILL)
        assert run.ends() == 1
        assert run.said().count("rank 1 ") == 1
        said = failure(tmp_path / "out")
        assert (said.id, said.fields["rank"]) == ("rank_killed_by_somebody", 1)
        assert "Traceback" not in run.said()
        assert_gone([*run.pids, *children])
    assert not (tmp_path / "out" / "weights.safetensors").exists()


@pytest.mark.parametrize("launcher", on_launchers("mpirun"))
def test_a_killed_launcher(launcher: str, tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", launcher) as run:
        os.kill(psutil.Process(run.parent.pid).children()[0].pid, signal.SIGKILL)
        assert run.ends() == 1
        assert "SIGKILL" in run.said()
        assert_gone(run.pids)


@pytest.mark.parametrize("launcher", on_launchers("spawn"))
def test_a_killed_parent(launcher: str, tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", launcher, "--set", "workers=1") as run:
        assert len(run.pids) >= 5  # launcher, two ranks, a loader worker each
        os.kill(run.parent.pid, signal.SIGKILL)
        run.ends()
        assert_gone(run.pids)


@pytest.mark.check
def test_asked_to_end(tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", "torchrun") as run:
        run.parent.send_signal(signal.SIGTERM)
        wait_until(lambda: "received SIGTERM" in run.said(), "it was not asked to stop", run.said)
        run.parent.send_signal(signal.SIGTERM)
        assert run.ends() == 143
        assert "Traceback" not in run.said()
        assert_gone(run.pids)


@pytest.mark.check
def test_asked_to_stop_it_leaves_a_checkpoint_that_continues(tmp_path: Path) -> None:
    """By SIGTERM, as Kubernetes does; by SIGHUP, as a terminal that goes."""
    with training("slow", tmp_path / "out", "torchrun") as run:
        run.parent.send_signal(signal.SIGTERM)
        assert run.ends() == 130, run.said()
        assert "received SIGTERM" in run.said()
        assert_gone(run.pids)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    (tmp_path / "out" / "progress.json").unlink()  # by which the next launch's beginning is recognised
    with training("slow", tmp_path / "out", "fork") as run:
        run.parent.send_signal(signal.SIGHUP)
        assert run.ends() == 130, run.said()
        assert f"{checkpoint.name.replace('-', ' ')}, of ddp" in run.said()


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        *(pytest.param(name, marks=CHECK) for name in ("lightning", "single")),
        *(pytest.param(name, marks=FULL) for name in ("deepspeed", "accelerate")),
    ],
)
def test_an_interrupt_stops_all_ranks_after_the_same_step(engine: str, tmp_path: Path) -> None:
    """Also where the library owns the loop, and has drawn the next batch already."""
    out = tmp_path / "out"
    launcher = {"ddp": "torchrun", "lightning": "torchrun", "single": "process"}.get(engine, "fork")
    with training("slow", out, launcher, "--engine", engine) as run:
        run.parent.send_signal(signal.SIGINT)
        assert run.ends() == 130, run.said()
        assert "interrupt again" in run.said()
        assert_gone(run.pids)
    results = json.loads((out / "results.json").read_text())
    steps = {len(json.loads(path.read_text())["trainings"]["run"]["step_s"]) for path in out.glob("rank?.json")}
    assert steps == {results["steps"]} and 0 < results["steps"] < results["asked_steps"]
    assert (out / "weights.safetensors").exists()


@pytest.mark.check
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with training("hangs_on_rank_1", tmp_path / "out", "torchrun") as run:
        run.parent.send_signal(signal.SIGINT)
        wait_until(lambda: "interrupt again" in run.said(), "it says nothing", run.said)
        assert run.parent.poll() is None
        run.parent.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert run.said().splitlines()[-1].startswith("samestep: interrupted") and "Traceback" not in run.said()
        assert_gone(run.pids)


def run_to_its_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "run", "--nproc", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(100))


@pytest.mark.check
@pytest.mark.parametrize("launcher", ["torchrun", *on_launchers("spawn")[1:]])
def test_an_error_is_told_once_with_its_rank(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = f"{JOBS}:raises_on_rank_1"
    done = run_to_its_end(job, "--launcher", launcher, *deadline(), "--out", str(out))
    assert done.returncode == 1
    assert done.stderr.count("3 is bad") == 1
    said = failure(out)
    assert (said.id, said.fields["rank"], said.fields["log"]) == ("rank_failed", 1, str(out / "rank1.log"))
    assert "Traceback" not in done.stderr
    assert "3 is bad" in (out / "rank1.log").read_text()
    assert_gone([pid_of(path) for path in out.glob("pid-rank*")])


@pytest.mark.check
def test_an_error_whose_words_are_a_lost_connections_too(tmp_path: Path) -> None:
    run_to_its_end(f"{JOBS}:times_out_on_rank_1", *deadline(), "--out", str(tmp_path / "out"))
    said = failure(tmp_path / "out")
    assert (said.id, said.fields["rank"]) == ("rank_failed", 1)


@pytest.mark.parametrize("launcher", on_launchers("torchrun"))
def test_a_rank_that_leaves_without_a_word(launcher: str, tmp_path: Path) -> None:
    job = f"{JOBS}:leaves_on_rank_1"
    done = run_to_its_end(job, "--launcher", launcher, *deadline(), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    said = failure(tmp_path / "out")
    assert said.id == "rank_exited_before_its_end" and (said.fields["rank"], said.fields["code"]) == (1, 7)


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_daemon_of_the_job_ends_with_a_normal_end(command: str, tmp_path: Path) -> None:
    """One that is in no session of ours, and has no variable of ours: of the inspection, and of each rank."""
    own = ["--engine", "ddp", "--nproc", "2", *deadline(), "--set", "mark=9.25"]
    done = samestep(command, f"{JOBS}:leaves_a_daemon", *own, out=tmp_path / "out")
    assert done.returncode == 0, done.stderr

    def left() -> list[int]:
        found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
        return [process.pid for process in found if process.info["cmdline"][:3] == ["sleep", "986", "9.25"]]

    try:
        wait_until(lambda: not left(), "still there", left, imports=5)
    finally:
        for pid in left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=CHECK), pytest.param("spawn", marks=FULL)])
def test_the_interface_reaches_the_ranks(launcher: str, tmp_path: Path) -> None:
    """NCCL's too, which nobody names for ranks on one machine unless they are told."""
    job, out = f"{JOBS}:prints_its_interfaces", tmp_path / "out"
    done = run_to_its_end(job, "--launcher", launcher, "--interface", "lo", *deadline(), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "NCCL lo" in (out / "rank1.log").read_text()
    assert json.loads((out / "rank1.json").read_text())["machine"]["interface"] == "lo"


def test_an_interface_that_is_not_here_is_refused(tmp_path: Path) -> None:
    done = run_to_its_end(f"{JOBS}:quick", "--interface", "nowhere0", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert re.search("--interface nowhere0: .*lo", done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.check
def test_a_hang_ends_at_its_deadline_with_every_stack(tmp_path: Path) -> None:
    out, limit = tmp_path / "out", deadline(4)
    # Where an import takes long, the watchdog would name the rank before the deadline.
    asked = ("--launcher", "fork", "--stall", "0", *limit)
    done = run_to_its_end(f"{JOBS}:hangs_on_rank_1", *asked, "--out", str(out))
    assert done.returncode == 1
    assert failure(out).id == "launch_reached_its_deadline" and f" {limit[1]} s" in done.stderr
    assert "in criterion" in (out / "stack-rank1.txt").read_text()
    assert "backward" in (out / "stack-rank0.txt").read_text()
    assert_gone([pid_of(path) for path in out.glob("pid-rank*")])


@pytest.mark.check
def test_a_launch_of_a_proof_ends_at_its_deadline(tmp_path: Path) -> None:
    out, limit = tmp_path / "out", deadline(4)
    done = samestep("verify", f"{JOBS}:hangs_on_rank_1", "--engine", "ddp", "--nproc", "2", *limit, out=out, imports=30)
    assert done.returncode == 1, done.stderr
    assert f"within {limit[1]} s" in done.stdout
    assert "in criterion" in (out / "launches" / "ddp-fork-0" / "stack-rank1.txt").read_text()
    assert_gone([pid_of(path) for path in out.glob("**/pid-rank*")])


@pytest.mark.check
def test_no_rank_ends_through_the_interpreters_exit(tmp_path: Path) -> None:
    """There gloo's threads abort one in three healthy processes. The job's file says so if one does."""
    done = run_to_its_end(f"{JOBS}:quick", "--launcher", "spawn", *deadline(), "--out", str(tmp_path / "out"))
    logs = [path.read_text() for path in (tmp_path / "out").glob("*.log")]
    assert done.returncode == 0 and "8 steps" in done.stdout and len(logs) == 2, done.stderr
    assert not any(NORMAL_EXIT in log or "terminate" in log for log in logs)
