"""Inside somebody's torchrun, mpirun or horovodrun: this command is one of their ranks, the training is the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from cluster import skip_where
from command import JOBS, samestep
from foreign_folder import assert_none_ran, foreign_folder
from lane_marks import CHECK, FULL

BIN = Path(sys.executable).parent
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
AROUND = {
    "torchrun -m": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "samestep"],
    "torchrun --no-python": [
        *(str(BIN / "torchrun"), "--nproc-per-node=2", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=127.0.0.1:0", "--no-python", sys.executable, "-m", "samestep"),
    ],
    "mpirun": ["mpirun", "-np", "2", "--oversubscribe", sys.executable, "-m", "samestep"],
    "horovodrun": [str(BIN / "horovodrun"), "-np", "2", "--gloo", sys.executable, "-m", "samestep"],
}


def typed(command: list[str], cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ROOT | env
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(250), env=environment, cwd=cwd)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of the same training, started by samestep itself."""
    out = tmp_path_factory.mktemp("alone") / "out"
    done = samestep("run", f"{JOBS}:quick", "--nproc", "2", out=out)
    assert done.returncode == 0, done.stderr
    return (out / "weights.safetensors").read_bytes()


@pytest.mark.check
@pytest.mark.parametrize(
    "around",
    [
        "torchrun -m",
        pytest.param("torchrun --no-python", marks=FULL),
        *(pytest.param(name, marks=CHECK) for name in ("mpirun", "horovodrun")),
    ],
)
def test_it_is_one_of_its_ranks(around: str, weights: bytes, tmp_path: Path) -> None:
    skip_where_missing(around)
    out = tmp_path / "out"
    engine = "horovod" if around == "horovodrun" else "ddp"
    folder = foreign_folder(tmp_path)
    cwd = None if around == "horovodrun" else folder  # it starts Python itself, as its user
    done = typed([*AROUND[around], "run", f"{JOBS}:quick", "--engine", engine, "--out", str(out)], cwd)
    assert done.returncode == 0, done.stderr
    assert_none_ran(folder)
    assert done.stdout.count(f"{engine} on 2 ranks") == 1
    assert (out / "weights.safetensors").read_bytes() == weights
    assert {path.name for path in out.glob("rank-*/rank*.log")} == {"rank0.log", "rank1.log"}


def test_a_command_that_starts_ranks_itself_says_so(tmp_path: Path) -> None:
    done = typed([*AROUND["torchrun -m"], "verify", "digits", "--out", str(tmp_path / "out")])
    assert "torchrun has started" in done.stderr
    assert not (tmp_path / "out").exists()


STARTED = "torchrun has started 2"


def skip_where_missing(around: str) -> None:
    """Skips a test whose launcher is not installed."""
    program = AROUND[around][0]
    skip_where(None if shutil.which(program) else f"{program} is not installed")


REFUSED = [
    ("mpirun", ["--nproc", "2"], "mpirun has started this command as 2 ranks; with --nproc"),
    ("torchrun -m", ["--launcher", "spawn"], "torchrun has started this command as 2 ranks; with --nproc"),
]
REFUSED_TOO = [
    ("torchrun -m", ["--engine", "horovod"], f"{STARTED} processes, and horovod starts with horovodrun"),
    ("torchrun -m", ["--engine", "single"], f"{STARTED} processes, and single starts with process"),
    ("torchrun -m", ["--port", "29517"], "torchrun has started this rank, and --port is for ranks that samestep"),
]


@pytest.mark.parametrize(
    ("around", "options", "says"),
    [*REFUSED, *(pytest.param(*case, marks=FULL) for case in REFUSED_TOO)],
)
def test_what_would_train_apart_is_refused(around: str, options: list[str], says: str, tmp_path: Path) -> None:
    skip_where_missing(around)
    done = typed([*AROUND[around], "run", f"{JOBS}:quick", "--out", str(tmp_path / "out"), *options])
    assert done.returncode != 0
    assert says in done.stderr
    assert not list(tmp_path.glob("**/weights.safetensors"))


@FULL
def test_two_commands_in_one_mpirun(weights: bytes, tmp_path: Path) -> None:
    command = f"{sys.executable} -m samestep run {JOBS}:quick --out {tmp_path}"
    (tmp_path / "tmp").mkdir()
    skip_where_missing("mpirun")
    both = ["sh", "-c", f"{command}/a && {command}/b"]
    done = typed(["mpirun", "-np", "2", "--oversubscribe", *both], TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / out / "weights.safetensors").read_bytes() == weights for out in "ab"] == [True, True]
    assert not list((tmp_path / "tmp").glob("samestep-*/*"))


@pytest.mark.check
def test_two_ranks_with_one_local_rank(tmp_path: Path) -> None:
    from samestep.launch.rendezvous_address import free_port

    port, out = str(free_port("127.0.0.1")), str(tmp_path / "out")
    command = [sys.executable, "-m", "samestep", "run", f"{JOBS}:quick", "--out", out, "--timeout", f"{budget():.0f}"]
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=budget(100))[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert all("ranks 0-1 on" in text and "local rank 0" in text for text in said), said


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=CHECK), pytest.param("spawn", marks=FULL)])
def test_a_dry_run_prints_a_line_that_works_when_pasted(launcher: str, weights: bytes, tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    command = [sys.executable, "-m", "samestep", "run", f"{JOBS}:quick", "--nproc", "2", "--out", str(out)]
    printed = typed([*command, "--launcher", launcher, "--dry-run"])
    assert printed.returncode == 0 and not (out / "weights.safetensors").exists()
    pasted = typed(["bash", "-c", printed.stdout])
    assert pasted.returncode == 0, pasted.stderr
    assert (out / "weights.safetensors").read_bytes() == weights
