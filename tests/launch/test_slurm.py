"""A real Slurm: srun, sbatch, requeue, the signal before the limit. Two nodes, each a host of its own."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import slurm as slurm_module
from cluster.slurm import Slurm

JOBS = Path(__file__).parent / "jobs.py"
SAMESTEP = [sys.executable, "-m", "samestep"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = slurm_module.missing()
    if reason:
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    with Slurm() as cluster:
        yield cluster


def submitted(slurm: Slurm, job: str, out: Path) -> str:
    """The number of a job that `samestep slurm` has queued on both nodes."""
    line = ["slurm", f"{JOBS}:{job}", "--nodes", "2", "--nproc", "1", "--time", "10", "--out", str(out)]
    done = slurm.run(*SAMESTEP, *line)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def trains(out: Path, since: float = 0.0) -> None:
    """Waits until a training in `out` has taken steps."""
    until = time.monotonic() + 90
    while not any(p.stat().st_mtime > since and '"done"' in p.read_text() for p in out.glob("machine-*/progress.json")):
        assert time.monotonic() < until, [path.read_text() for path in out.glob("slurm-*.out")]
        time.sleep(0.1)


def left(slurm: Slurm) -> list[str]:
    """Processes of ours on the nodes, given five seconds to go."""
    until = time.monotonic() + 5
    while True:
        lines = [Path(f"/proc/{pid}/cmdline") for node in (1, 2) for pid in slurm.hosts.pids(node)]
        ours = [text for line in lines if line.exists() and "samestep" in (text := line.read_text())]
        ours = [text for text in ours if not text.startswith("slurm")]
        if not ours or time.monotonic() > until:
            return ours
        time.sleep(0.1)


def test_plain_srun(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "run", f"{JOBS}:quick", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ddp on 2 ranks: 8 steps") == 1
    assert (out / "weights.safetensors").exists()
    assert {path.name for path in out.glob("rank-*/rank*.log")} == {"rank0.log", "rank1.log"}


def test_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    number = submitted(slurm, "quick", out)
    assert slurm.wait(number, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    said = (out / f"slurm-{number}.out").read_text()
    assert "ddp on 2 ranks: 8 steps" in said and "interface eth0, which leads to h1" in said
    assert (out / "weights.safetensors").exists()


def test_the_same_step_under_srun(slurm: Slurm, tmp_path: Path) -> None:
    line = [
        "verify",
        "digits",
        "--engines",
        "ddp,lightning,deepspeed",
        "--launcher",
        "srun",
        "--out",
        str(tmp_path / "o"),
    ]
    done = slurm.run("salloc", "-N2", *SAMESTEP, *line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same step") == 3, done.stdout


def test_the_signal_before_the_limit_stops_after_a_step(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = submitted(slurm, "slow", out)
    trains(out)
    assert slurm.run("scancel", "--signal=USR1", number).returncode == 0
    assert slurm.wait(number, "COMPLETED", "FAILED")["ExitCode"] == "130:0"
    said = (out / f"slurm-{number}.out").read_text()
    stopped = re.search(r"stopped after step (\d+) of \d+, as asked", said)
    assert stopped and f"weights.safetensors, of step {stopped[1]}\n" in said
    assert (out / "weights.safetensors").exists()
    assert left(slurm) == []


def test_a_requeued_job_starts_again_and_a_cancelled_one_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = submitted(slurm, "slow", out)
    trains(out)
    assert slurm.run("scontrol", "requeue", number).returncode == 0
    asked = time.time()
    while slurm.job(number).get("Restarts") != "1" or slurm.job(number).get("JobState") != "RUNNING":
        assert time.time() < asked + 60, slurm.job(number)
        time.sleep(0.2)
    trains(out, since=time.time())
    assert slurm.run("scancel", number).returncode == 0
    slurm.wait(number, "CANCELLED")
    assert left(slurm) == []


def test_a_killed_command_takes_its_step_along(slurm: Slurm, tmp_path: Path) -> None:
    """srun's tasks are children of Slurm's daemon, not of ours."""
    out = tmp_path / "out"
    line = ["run", f"{JOBS}:slow", "--launcher", "srun", "--nproc", "1", "--out", str(out)]
    command = slurm.hosts.start(0, ["salloc", "-N2", *SAMESTEP, *line], env=slurm.environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not (out / "progress.json").exists() or '"done"' not in (out / "progress.json").read_text():
            assert time.monotonic() < until
            time.sleep(0.1)
        import psutil

        ours = [p for p in psutil.Process(command.pid).children(recursive=True) if "samestep" in " ".join(p.cmdline())]
        ours[0].kill()
        assert left(slurm) == []
    finally:
        command.kill()
        command.wait()
        slurm.run("scancel", "-u", "root")


def test_contradictions_are_told_with_the_line_to_type(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "run", "digits", "--out", str(tmp_path / "o"), WORLD_SIZE="8")
    assert done.returncode == 2
    assert "WORLD_SIZE=8 contradicts srun's SLURM_NTASKS=2; type `unset RANK WORLD_SIZE LOCAL_RANK`" in done.stderr
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "verify", "digits", "--out", str(tmp_path / "o"))
    assert "type it without srun, inside salloc or sbatch, with --launcher srun" in done.stderr
