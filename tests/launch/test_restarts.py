"""A rank that dies and comes back; a rank that the kernel kills for memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget import budget
from command import JOBS, failure
from lane_marks import FULL
from samestep.message import message

pytestmark = pytest.mark.check

CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2


def run(job: str, out: Path, *more: str, **popen: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "run", f"{JOBS}:{job}", "--nproc", "2", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(100), **popen)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of the same training, in which no rank dies."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = run("quick", out, "--launcher", "fork")
    assert done.returncode == 0, done.stderr
    return (out / "weights.safetensors").read_bytes()


def test_a_killed_rank_comes_back_and_the_result_is_the_same(weights: bytes, tmp_path: Path) -> None:
    again = run("dies_once", tmp_path / "again", "--max-restarts", "2")
    assert again.returncode == 0, again.stderr
    assert "torchrun" in again.stderr and "(restart 1)" in again.stderr
    assert (tmp_path / "again" / "weights.safetensors").read_bytes() == weights


def test_restarted_ranks_continue_from_the_newest_checkpoint(weights: bytes, tmp_path: Path) -> None:
    """Rank 1 is killed by signal 9 in step 3, while the checkpoint before it may still be written."""
    again = run("dies_once", tmp_path / "again", "--max-restarts", "2", "--checkpoint-every", "1steps")
    assert again.returncode == 0, again.stderr
    assert "from the checkpoint" in again.stderr
    assert json.loads((tmp_path / "again" / "results.json").read_text())["resumed_from"] in (1, 2, 3)
    assert (tmp_path / "again" / "weights.safetensors").read_bytes() == weights


def test_a_users_mistake_is_told_without_a_restart(tmp_path: Path) -> None:
    refusals = tmp_path / "refusals"
    environment = os.environ | {"REFUSALS": str(refusals)}
    done = run("is_refused_on_rank_1", tmp_path / "out", "--max-restarts", "3", env=environment)
    assert done.returncode == 2, done.stderr
    assert "begin at 0" in done.stderr and "Traceback" not in done.stderr
    assert refusals.read_text() == "1"


@FULL
def test_without_restarts_it_ends(tmp_path: Path) -> None:
    done = run("dies_once", tmp_path / "out")
    assert done.returncode == 1
    said = failure(tmp_path / "out")
    assert (said.id, said.fields["rank"]) == ("rank_killed_by_somebody", 1)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 1,200 MiB: two ranks fit, and not much more."""
    root = next((root for root in CGROUPS if (root / "cgroup.procs").exists()), None)
    if root is None or not os.access(root, os.W_OK):
        assert "CI" not in os.environ, "no control group can be made here"
        pytest.skip("no control group can be made here")
    group = root / f"samestep-test-{os.getpid()}"
    group.mkdir()
    limit = group / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")
    limit.write_text(str(1200 * 2**20))
    yield group
    group.rmdir()


def test_the_kernels_memory_killer_is_named(small_group: Path, tmp_path: Path) -> None:
    def enter() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    done = run("eats_memory", tmp_path / "out", preexec_fn=enter)
    assert done.returncode == 1
    said = failure(tmp_path / "out")
    assert (said.id, said.fields["rank"]) == ("rank_killed_for_memory", 1)
    assert said.fields["why"] == message("killed_for_memory", processes=1, limit_mib=1200)
