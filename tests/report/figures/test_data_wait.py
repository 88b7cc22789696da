"""What is said about waiting for data: which setting would help, from the numbers, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_results import MACHINE

from budget import deadline
from command import JOBS as SLOW
from command import samestep
from samestep.commands.run import measure_data_wait
from samestep.records.files import write
from samestep.records.record import RankRecord, Record, TrainingRecord
from samestep.report.figures.data_wait import Waiting, measured
from samestep.world import World

# A step of 46 ms, 34 of them waiting for the batch that the training process itself loads.
LOADS_ITSELF = Waiting(step_s=0.046, wait_s=0.034, fetch_s=0.034, rows=64, workers=0, prefetch=2, cores=8)


def test_rates() -> None:
    assert LOADS_ITSELF.share == pytest.approx(34 / 46)
    assert LOADS_ITSELF.demand == pytest.approx(64 / 0.012)
    assert LOADS_ITSELF.loader_ceiling == pytest.approx(64 / 0.034)
    assert replace(LOADS_ITSELF, workers=3).loader_ceiling == pytest.approx(3 * 64 / 0.034)
    assert replace(LOADS_ITSELF, fetch_s=0.0).loader_ceiling is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "loading a batch takes 34 ms and a step 12 ms: 3 workers would keep up; --set workers=3"),
        (
            {"fetch_s": 0.011, "step_s": 0.023, "wait_s": 0.011},
            "loading a batch takes 11 ms and a step 12 ms: 1 worker would keep up; --set workers=1",
        ),
        ({"workers": 1, "step_s": 0.034, "wait_s": 0.022}, "3 workers would keep up; --set workers=3"),
        (  # one that only just keeps up
            {"cores": 2, "workers": 1, "fetch_s": 0.027, "step_s": 0.032, "wait_s": 0.004},
            "step 28 ms: 2 workers would keep up, and each rank has 1 core beside the one that trains",
        ),
        ({"cores": 3}, "2 workers would make training 2.7 times as fast; --set workers=2"),
        (
            {"cores": 3, "workers": 1, "step_s": 0.034, "wait_s": 0.022},
            "2 workers would make training 2.0 times as fast; --set workers=2",
        ),
        (  # one worker beside a short step: loading takes as long as before
            {"cores": 2, "step_s": 0.037, "wait_s": 0.034},
            "12 workers would keep up, and each rank has 1 core beside the one that trains; make loading cheaper",
        ),
        (
            {"cores": 1},
            "3 workers would keep up, and each rank has 0 cores beside the one that trains; make loading cheaper",
        ),
        (
            {"cores": 3, "workers": 2, "step_s": 0.017, "wait_s": 0.005},
            "each rank has 2 cores beside the one that trains; make loading cheaper",
        ),
        (
            {"workers": 4, "step_s": 0.014, "wait_s": 0.002},
            "4 workers keep up on average, but data comes in bursts; --set prefetch=4 loads further ahead",
        ),
        (  # a worker that waits for a disk needs no core
            {"cores": 1, "fetch_cpu_s": 0.001},
            "most of it waiting for a disk or a network (1.00 ms of work), and a step 12 ms: 3 workers would keep up",
        ),
        (
            {"cores": 1, "fetch_cpu_s": 0.001, "workers": 2, "step_s": 0.201, "wait_s": 0.200, "fetch_s": 0.4},
            "8 workers would make training 4.0 times as fast; --set workers=8",
        ),
        (
            {"cores": 1, "fetch_cpu_s": 0.001, "workers": 8, "step_s": 0.062, "wait_s": 0.050, "fetch_s": 0.4},
            "34 workers would keep up, more than this machine can run; keep the data on a local disk",
        ),
        ({"cores": 1, "fetch_cpu_s": 0.02}, "3 workers would keep up, and each rank has 0 cores"),
        (
            {"fetch_s": 0.0005, "step_s": 0.0012, "wait_s": 0.0005},
            "loading a batch takes 0.50 ms and a step 0.70 ms: 1 worker",
        ),
    ],
)
def test_the_setting_that_helps(changes: dict[str, float], sentence: str) -> None:
    advice = replace(LOADS_ITSELF, **changes).advice()  # type: ignore[arg-type]
    assert advice and sentence in advice


@pytest.mark.parametrize(
    ("most", "workers", "says"),
    [(0, 0, "uint8 for pixels"), (1, 1, "read by one worker"), (1, 0, "read by one worker")],
)
def test_workers_that_would_not_help_are_not_advised(most: int, workers: int, says: str) -> None:
    advice = replace(LOADS_ITSELF, step_s=0.037, most_workers=most, workers=workers, cores=16).advice()
    assert advice and says in advice and "--set workers" not in advice


def test_little_waiting_is_not_worth_a_word() -> None:
    assert replace(LOADS_ITSELF, wait_s=0.05 * 0.046).advice() is None
    assert replace(LOADS_ITSELF, wait_s=0.051 * 0.046).advice() is not None


def test_the_first_step_waits_for_the_loader_to_start_and_does_not_count() -> None:
    ranks = [
        TrainingRecord(step_s=[9.0, 0.03, 0.05], wait_s=[8.9, 0.01, 0.02], fetch_s=0.06, fetch_cpu_s=0.03),
        TrainingRecord(step_s=[9.0, 0.03, 0.05], wait_s=[8.9, 0.02, 0.03], fetch_s=0.12, fetch_cpu_s=0.03),
    ]
    found = measured(ranks, 64, 1, 2, 4.0)
    near = pytest.approx
    wanted: Any = (near(0.04), near(0.02), near(0.03), 64, 1, 2, 4.0, 1_000, near(0.01))
    assert found == Waiting(*wanted)
    assert measured([TrainingRecord()], 64, 1, 2, 4.0) is None
    one = measured([TrainingRecord(step_s=[2.0], wait_s=[1.0], fetch_s=1.0)], 64, 0, 2, 4.0)
    assert one and one.share == 0.5


@pytest.mark.parametrize(
    ("local_ranks", "sentence"),
    [(1, "3 workers would keep up; --set workers=3"), (4, "1 worker would make training 1.4 times")],
)
def test_the_ranks_of_a_machine_share_its_cores(local_ranks: int, sentence: str, tmp_path: Path) -> None:
    job: Any = SimpleNamespace(global_batch=64, workers=0, prefetch=2, most_workers=1_000)
    seen = TrainingRecord(step_s=[0.046] * 3, wait_s=[0.034] * 3, fetch_s=0.102, fetch_cpu_s=0.102)
    for rank in range(local_ranks):
        world = World(rank=rank, size=local_ranks, local_rank=rank, local_size=local_ranks)
        write(tmp_path / f"rank{rank}.json", RankRecord(rank, world, 1, 0.0, MACHINE, trainings={"run": seen}))
    found = measure_data_wait(job, Record(tmp_path))
    assert found and sentence in str(found.advice())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_that_waits_is_told_why(workers: int, tmp_path: Path) -> None:
    """launch/jobs.py's slow(): each sample sleeps for 20 ms, a step is a matrix of 4x3."""
    arguments = ["run", f"{SLOW}:slow_briefly", "--engine", "single", "--set", f"workers={workers}"]
    done = samestep(*arguments, *deadline(), "--device", "cpu", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["wait_share"] > 0.5
    assert results["loader_ceiling"] < 1 / 0.02 * max(1, workers)  # rows per second: what the sleeps allow
    assert results["demand"] > results["loader_ceiling"]
    assert "loading a batch takes" in results["advice"]["english"] and "--set workers=" in results["advice"]["english"]
    assert "waiting for a disk or a network" in results["advice"]["english"]
    assert f"of the time: {results['advice']['english']}" in done.stdout
