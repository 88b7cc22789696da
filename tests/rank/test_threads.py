"""With how many threads a rank computes: all cores of its process, shared among the machine's ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from joblib import cpu_count

from command import samestep
from samestep.rank.hardware import cores_for_each

CORES = cpu_count(only_physical_cores=True)
JOB = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)

def job():
    rows = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)
    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=rows,
        evaluation=rows,
        metrics={"threads": lambda output, batch: torch.full((len(output),), float(torch.get_num_threads()))},
        global_batch=8,
    )
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    """A job whose evaluation measures the threads that it computes with."""
    (tmp_path / "job.py").write_text(JOB)
    return str(tmp_path / "job.py")


def test_one_core_gives_one_thread() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert cores_for_each(1) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_share_the_cores() -> None:
    assert cores_for_each(1) == CORES
    assert cores_for_each(CORES) == 1
    assert cores_for_each(1000) == 1


def trained(job: str, out: Path, *arguments: str) -> tuple[float, int]:
    """Returns the threads that a training of one rank computed with, and those that its results tell."""
    done = samestep("run", job, "--nproc", "1", "--json", *arguments, out=out)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["evaluation"]["threads"], found["threads_per_rank"]


@pytest.mark.skipif(CORES < 2, reason="one core alone")
def test_one_rank_takes_all_cores_unless_told_otherwise(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert trained(job, tmp_path / "all") == (CORES, CORES)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert trained(job, tmp_path / "one") == (1, 1)
    assert trained(job, tmp_path / "three", "--threads", "3") == (3, 3)


@pytest.mark.check
def test_engines_are_compared_with_the_same_threads(job: str, tmp_path: Path) -> None:
    asked = ["--engine", "ddp", "--launcher", "fork", "--rounds", "1", "--measured-steps", "2", "--threads", "2"]
    done = samestep("compare", job, *asked, "--json", out=tmp_path / "out")
    found = json.loads(done.stdout)
    assert found["threads_per_rank"] == 2
    assert [row["verdict"] for row in found["engines"]] == ["same", "same"]
    records = [json.loads(path.read_text()) for path in (tmp_path / "out" / "launches").glob("*/rank?.json")]
    assert [record["threads"] for record in records] == [2, 2, 2]


def test_too_many_threads_are_one_sentence(job: str) -> None:
    done = samestep("run", job, "--threads", "100000")
    assert done.returncode == 2 and "--threads" in done.stderr and "4096" in done.stderr
