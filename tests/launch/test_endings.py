"""However a launch ends, all that it started has ended: killed ranks, launchers, parents, Ctrl-C, errors, hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import psutil
import pytest

from samestep.launch import Machines, command, supervise

JOBS = Path(__file__).parent / "jobs.py"
LAUNCHERS = ["torchrun", "spawn", "mpirun"] if which("mpirun") or "CI" in os.environ else ["torchrun", "spawn"]


@contextmanager
def training(job: str, out: Path, launcher: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A real `samestep run` on two ranks that has begun to train, and the pids of all that it started."""
    command = [sys.executable, "-m", "samestep", "run", f"{JOBS}:{job}", "--nproc", "2", "--launcher", launcher]
    parent = subprocess.Popen(
        [*command, "--out", str(out), *more],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in a background job
    )
    pids: list[int] = []
    try:
        until = time.monotonic() + 60
        while not (out / "progress.json").exists() or '"done"' not in (out / "progress.json").read_text():
            assert time.monotonic() < until, "it did not begin to train"
            assert parent.poll() is None, parent.stderr and parent.stderr.read()
            time.sleep(0.05)
        pids += [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        yield parent, pids
    finally:
        for pid in [*pids, parent.pid]:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        parent.wait()


def pid_of(path: Path) -> int:
    return int(path.read_text().partition("@")[0])


def assert_gone(pids: list[int], within_s: float = 8.0) -> None:
    until = time.monotonic() + within_s
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < until, f"still alive: {[psutil.Process(pid).cmdline() for pid in alive]}"
        time.sleep(0.05)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_command_killed_while_its_ranks_still_import(launcher: str, tmp_path: Path) -> None:
    """Before a rank can tie itself to its parent, that parent may have gone."""
    command = [sys.executable, "-m", "samestep", "run", "digits", "--nproc", "2", "--launcher", launcher]
    parent = subprocess.Popen([*command, "--out", str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        until = time.monotonic() + 60
        while len(pids) < 3:  # the launcher and two ranks
            assert time.monotonic() < until
            tree = psutil.Process(parent.pid).children(recursive=True)
            pids = [
                p.pid for p in tree if "plan.json" in " ".join(p.cmdline()) or "spawn_main" in " ".join(p.cmdline())
            ]
            time.sleep(0.02)
        parent.kill()
        parent.wait()
        assert_gone(pids, within_s=20)
    finally:
        parent.kill()
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank(launcher: str, tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", launcher) as (parent, pids):
        os.kill(pid_of(tmp_path / "out" / "pid-rank1"), signal.SIGKILL)
        _, said = parent.communicate(timeout=40)
        assert parent.returncode == 1
        assert "rank 1 was ended by SIGKILL" in said
        assert said.count("rank 1 ") == 1
        assert "the kernel counts no kill for memory" in said
        assert "Traceback" not in said
        assert_gone(pids)
    assert not (tmp_path / "out" / "weights.safetensors").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_launcher(launcher: str, tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", launcher) as (parent, pids):
        os.kill(psutil.Process(parent.pid).children()[0].pid, signal.SIGKILL)
        _, said = parent.communicate(timeout=40)
        assert parent.returncode == 1
        assert "SIGKILL" in said
        assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_parent(launcher: str, tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", launcher, "--set", "workers=1") as (parent, pids):
        assert len(pids) >= 5  # launcher, two ranks, a loader worker each
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert_gone(pids)


def test_asked_to_end(tmp_path: Path) -> None:
    with training("slow", tmp_path / "out", "torchrun") as (parent, pids):
        parent.send_signal(signal.SIGTERM)
        _, said = parent.communicate(timeout=40)
        assert parent.returncode == 143
        assert "Traceback" not in said
        assert_gone(pids, within_s=1)


@pytest.mark.parametrize("engine", ["ddp", "lightning", "deepspeed", "accelerate", "single"])
def test_an_interrupt_stops_all_ranks_after_the_same_step(engine: str, tmp_path: Path) -> None:
    """Also where the library owns the loop, and has drawn the next batch already."""
    out = tmp_path / "out"
    launcher = "process" if engine == "single" else "torchrun"
    with training("slow", out, launcher, "--engine", engine) as (parent, pids):
        time.sleep(1)
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=60)
        assert parent.returncode == 130, said
        assert "stopping after a step; interrupt again to end at once" in said
        assert_gone(pids, within_s=1)
    results = json.loads((out / "results.json").read_text())
    steps = {len(json.loads(path.read_text())["trainings"]["train"]["step_s"]) for path in out.glob("rank?.json")}
    assert steps == {results["steps"]} and 0 < results["steps"] < results["asked_steps"]
    assert (out / "weights.safetensors").exists()


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with training("hangs_on_rank_1", tmp_path / "out", "torchrun") as (parent, pids):
        parent.send_signal(signal.SIGINT)
        time.sleep(1)
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=40)
        assert parent.returncode == 130
        assert "interrupted; everything that was started has ended" in said and "Traceback" not in said
        assert_gone(pids, within_s=1)


def run_to_its_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "run", "--nproc", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_error_is_told_once_with_its_rank(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = f"{JOBS}:raises_on_rank_1"
    done = run_to_its_end(job, "--launcher", launcher, "--deadline", "60", "--out", str(out))
    assert done.returncode == 1
    assert done.stderr.count("the data of step 3 is bad") == 1
    assert "rank 1 failed: RuntimeError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "the data of step 3 is bad" in (out / "rank1.log").read_text()
    assert_gone([pid_of(path) for path in out.glob("pid-rank*")])


def test_an_error_whose_words_are_a_lost_connections_too(tmp_path: Path) -> None:
    done = run_to_its_end(f"{JOBS}:times_out_on_rank_1", "--deadline", "60", "--out", str(tmp_path / "out"))
    assert "rank 1 failed: RuntimeError: timeout: the feature server reset the connection" in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_leaves_without_a_word(launcher: str, tmp_path: Path) -> None:
    job = f"{JOBS}:leaves_on_rank_1"
    done = run_to_its_end(job, "--launcher", launcher, "--deadline", "60", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "rank 1 left by itself with exit code 7" in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_killed_rank_had_started_ends_too(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training("with_a_child", out, launcher) as (parent, pids):
        (rank,) = [pid for pid in pids if pid == pid_of(out / "pid-rank1")]
        children = [child.pid for child in psutil.Process(rank).children()]
        assert [psutil.Process(pid).name() for pid in children] == ["sleep"]
        os.kill(rank, signal.SIGKILL)
        parent.wait(timeout=30)
        assert_gone([*pids, *children])


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_the_interface_reaches_the_ranks(launcher: str, tmp_path: Path) -> None:
    for name in list(psutil.net_if_addrs())[:2]:
        out = tmp_path / name
        done = run_to_its_end(f"{JOBS}:quick", "--launcher", launcher, "--interface", name, "--out", str(out))
        if done.returncode == 0:  # one without an address cannot be used
            assert json.loads((out / "rank1.json").read_text())["machine"]["interface"] == name
        else:
            assert name != "lo", done.stderr


def test_a_hang_ends_at_its_deadline_with_every_stack(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_to_its_end(f"{JOBS}:hangs_on_rank_1", "--deadline", "15", "--out", str(out))
    assert done.returncode == 1
    assert "nothing ended within 15 s" in done.stderr
    assert "in criterion" in (out / "stack-rank1.txt").read_text()
    assert "backward" in (out / "stack-rank0.txt").read_text()
    assert_gone([pid_of(path) for path in out.glob("pid-rank*")])


def test_healthy_launches_end_well_every_time(tmp_path: Path) -> None:
    """gloo's threads abort one in three healthy processes in the interpreter's own exit, so ranks do not take it."""
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        asked = {"job": f"{JOBS}:quick", "settings": {}, "engine": "ddp", "engine_settings": {}}
        asked["trainings"] = [{"kind": "measure", "as": "measure", "steps": 3}]
        plan = command.planned(asked, "spawn", 2, ["cpu"], folder, Machines())
        record = supervise.run(plan, folder, 2, deadline_s=60)
        assert record.complete(2)
        assert not any("terminate" in path.read_text() for path in folder.glob("*log*"))
        assert json.loads((folder / "rank1.json").read_text())["rank"] == 1
