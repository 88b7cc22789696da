"""A real Slurm: srun, sbatch, requeue, the signal before the limit. Two nodes, each a host of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from budget import budget, wait_until
from cluster import skip_where
from cluster import slurm as slurm_module
from cluster.slurm import Slurm
from command import JOBS, has_begun
from lane_marks import FULL
from planting import Edit
from recorder.plant import text_of

pytestmark = pytest.mark.check

SAMESTEP = [sys.executable, "-m", "samestep"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    skip_where(slurm_module.missing())
    with Slurm() as cluster:
        yield cluster


def submitted(slurm: Slurm, job: str, out: Path, *more: str, time: str = "10") -> str:
    """The number of a job that `samestep slurm` has queued on both nodes. time: its limit in minutes."""
    line = ["slurm", f"{JOBS}:{job}", "--nodes", "2", "--nproc", "1", "--time", time, "--out", str(out)]
    done = slurm.run(*SAMESTEP, *line, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def trains(out: Path, since: float = 0.0) -> None:
    """Waits until a training in `out` has taken steps."""

    def begun() -> bool:
        told = [path for path in out.glob("machine-*/progress.json") if path.stat().st_mtime > since]
        return any(has_begun(path.parent) for path in told)

    wait_until(
        begun, "it did not begin to train", lambda: [path.read_text() for path in out.glob("slurm-*.out")], imports=90
    )


def assert_nothing_left(slurm: Slurm) -> None:
    """No processes of ours on the nodes."""

    def left() -> list[str]:
        found = []
        for pid in (pid for node in (1, 2) for pid in slurm.hosts.pids(node)):
            with suppress(OSError):  # it has just ended
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return [text for text in found if "samestep" in text and not text.startswith("slurm")]

    wait_until(lambda: not left(), "still there", left)


def test_plain_srun(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "run", f"{JOBS}:quick", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks: 8 steps") == 1
    assert (out / "weights.safetensors").exists()
    assert {path.name for path in out.glob("rank-*/rank*.log")} == {"rank0.log", "rank1.log"}


def test_check_of_sruns_tasks(slurm: Slurm, tmp_path: Path) -> None:
    """A script that knows its rank from Slurm alone is recorded and judged, as one under torchrun is."""
    script = tmp_path / "train.py"
    opened = 'dist.init_process_group("gloo", f"file://{sys.argv[0]}.ranks", rank=rank, world_size=size)'
    ranks = "rank, size = (int(os.environ.get(f'SLURM_{name}', n)) for name, n in (('PROCID', 0), ('NTASKS', 1)))"
    by_slurm = Edit('dist.init_process_group("gloo")', f"{ranks}\n    {opened}")
    not_reduced = Edit("                dist.all_reduce(parameter.grad)\n", "")
    for edits, code in (([by_slurm], 0), ([by_slurm, not_reduced], 1)):
        script.write_text(f"import os\nimport sys\n{text_of('by_hand', *edits)}")
        out = tmp_path / f"out{code}"
        line = ["check", "--no-replay", "--nproc", "2", "--out", str(out), "--", "srun", "-N1", "-n2", "-O"]
        done = slurm.run(*SAMESTEP, *line, sys.executable, str(script))
        assert done.returncode == code, done.stdout + done.stderr
        assert "train.py on 2" in done.stdout
        assert ("usual cause: " in done.stdout) == bool(code)
        Path(f"{script}.ranks").unlink(missing_ok=True)


@FULL  # the training that goes on by itself begins so, too
def test_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    number = submitted(slurm, "quick", out)
    assert slurm.wait(number, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    said = (out / f"slurm-{number}.out").read_text()
    assert "ranks: 8 steps" in said and "interface eth0" in said
    assert (out / "weights.safetensors").exists()


def test_sbatch_on_one_node(slurm: Slurm, tmp_path: Path) -> None:
    """As `samestep slurm` writes it unless told otherwise."""
    out = tmp_path / "50%j"
    done = slurm.run(*SAMESTEP, "slurm", f"{JOBS}:quick", "--time", "10", "--out", str(out))
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[1]
    assert slurm.wait(number, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    assert "ranks: 8 steps" in (out / f"slurm-{number}.out").read_text()


@pytest.mark.parametrize("engines", ["ddp,deepspeed", pytest.param("fsdp,lightning", marks=FULL)])
def test_the_same_step_under_srun(engines: str, slurm: Slurm, tmp_path: Path) -> None:
    line = [
        "verify",
        "digits",
        "--engines",
        engines,
        "--launcher",
        "srun",
        "--out",
        str(tmp_path / "o"),
    ]
    done = slurm.run("salloc", "-N2", *SAMESTEP, *line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same step") == 2, done.stdout


def test_the_signal_before_the_limit_stops_after_a_step(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = submitted(slurm, "slow", out)
    trains(out)
    assert slurm.run("scancel", "--signal=USR1", number).returncode == 0
    assert slurm.wait(number, "COMPLETED", "FAILED")["ExitCode"] == "130:0"
    said = (out / f"slurm-{number}.out").read_text()
    stopped = re.search(r"stopped after step (\d+) of \d+: ", said)
    assert stopped and f"weights.safetensors, of step {stopped[1]}\n" in said
    assert (out / "weights.safetensors").exists()
    assert_nothing_left(slurm)


BEST = ("--best", "loss", "--evaluate-every", "5", "--checkpoint-every", "5epochs")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a training that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole") / "out"
    line = ["run", f"{JOBS}:slow_until_requeued", "--nproc", "2", "--launcher", "fork", "--out", str(out), *BEST]
    environment = os.environ | {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run([*SAMESTEP, *line], env=environment, capture_output=True, text=True, timeout=budget(100))
    assert done.returncode == 0, done.stderr
    return (out / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("how", ["limit", pytest.param("requeue", marks=FULL)])
def test_a_training_goes_on_by_itself(how: str, uninterrupted: bytes, slurm: Slurm, tmp_path: Path) -> None:
    """The limit is the job's own, of two minutes; Slurm looks for it every half minute, and so signals early. Once
    it is in the queue again it gets more: a busy machine may not begin to train before the next signal."""
    out = tmp_path / "out"
    limit = {"time": "2"} if how == "limit" else {}
    early = ["--sbatch=--signal=B:USR1@85"] if how == "limit" else []
    number = submitted(slurm, "slow_until_requeued", out, *BEST, *early, **limit)
    if how == "requeue":
        wait_until(lambda: list(out.glob("checkpoints/step-*")), "no checkpoint", imports=90)
        assert slurm.run("scontrol", "requeue", number).returncode == 0
    else:
        wait_until(lambda: int(slurm.job(number)["Restarts"]), "not again", lambda: slurm.job(number), imports=120)
        assert slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=20").returncode == 0
    ended = slurm.wait(number, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", imports=120)
    said = (out / f"slurm-{number}.out").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert "interface eth0" in said, said
    assert int(ended["Restarts"]) >= 1 and "from the checkpoint" in said, said
    assert how == "requeue" or "on request" in said, said
    assert (out / "weights.safetensors").read_bytes() == uninterrupted


def test_a_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = submitted(slurm, "slow", out)
    trains(out)
    assert slurm.run("scancel", number).returncode == 0
    slurm.wait(number, "CANCELLED")
    assert_nothing_left(slurm)


def test_a_killed_command_takes_its_step_along(slurm: Slurm, tmp_path: Path) -> None:
    """srun's tasks are children of Slurm's daemon, not of ours."""
    out = tmp_path / "out"
    line = ["run", f"{JOBS}:slow", "--launcher", "srun", "--nproc", "1", "--out", str(out)]
    command = slurm.hosts.start(0, ["salloc", "-N2", *SAMESTEP, *line], env=slurm.environment, start_new_session=True)
    try:
        wait_until(lambda: has_begun(out), "it did not begin to train")
        import psutil

        ours = [p for p in psutil.Process(command.pid).children(recursive=True) if "samestep" in " ".join(p.cmdline())]
        ours[0].kill()
        assert_nothing_left(slurm)
    finally:
        command.kill()
        command.wait()
        slurm.run("scancel", "-u", "root")


def test_contradictions_are_told_with_the_line_to_type(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "run", "digits", "--out", str(tmp_path / "o"), WORLD_SIZE="8")
    assert done.returncode == 2
    assert "WORLD_SIZE=8 contradicts" in done.stderr
    done = slurm.run("srun", "-N2", "-n2", *SAMESTEP, "verify", "digits", "--out", str(tmp_path / "o"))
    assert "salloc or sbatch" in done.stderr
