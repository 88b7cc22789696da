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
from said import says
from samestep.commands.run import measure_data_wait
from samestep.message import Message, message
from samestep.records.files import write
from samestep.records.record import RankRecord, Record
from samestep.records.training_record import TrainingRecord
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


def ms(loading: str, step: str, work: str | None = None) -> Message:
    return message("times_of_loading_and_step", loading=f"{loading} ms", step=f"{step} ms", work=work)


@pytest.mark.parametrize(
    ("changes", "identity", "fields"),
    [
        ({}, "workers_would_keep_up", {"times": ms("34", "12"), "workers": 3}),
        (
            {"fetch_s": 0.011, "step_s": 0.023, "wait_s": 0.011},
            "workers_would_keep_up",
            {"times": ms("11", "12"), "workers": 1},
        ),
        ({"workers": 1, "step_s": 0.034, "wait_s": 0.022}, "workers_would_keep_up", {"workers": 3}),
        (  # one that only just keeps up
            {"cores": 2, "workers": 1, "fetch_s": 0.027, "step_s": 0.032, "wait_s": 0.004},
            "workers_exceed_the_cores",
            {"times": ms("27", "28"), "workers": 2, "cores": 1},
        ),
        ({"cores": 3}, "workers_would_speed_up", {"workers": 2, "speedup": pytest.approx(2.7, abs=0.05)}),
        (
            {"cores": 3, "workers": 1, "step_s": 0.034, "wait_s": 0.022},
            "workers_would_speed_up",
            {"workers": 2, "speedup": pytest.approx(2.0, abs=0.05)},
        ),
        (  # one worker beside a short step: loading takes as long as before
            {"cores": 2, "step_s": 0.037, "wait_s": 0.034},
            "workers_exceed_the_cores",
            {"workers": 12, "cores": 1},
        ),
        ({"cores": 1}, "workers_exceed_the_cores", {"workers": 3, "cores": 0}),
        (
            {"cores": 3, "workers": 2, "step_s": 0.017, "wait_s": 0.005},
            "workers_exceed_the_cores",
            {"workers": 3, "cores": 2},
        ),
        ({"workers": 4, "step_s": 0.014, "wait_s": 0.002}, "data_comes_in_bursts", {"workers": 4, "prefetch": 4}),
        (  # a worker that waits for a disk needs no core
            {"cores": 1, "fetch_cpu_s": 0.001},
            "workers_would_keep_up",
            {"times": ms("34", "12", "1.00 ms"), "workers": 3},
        ),
        (
            {"cores": 1, "fetch_cpu_s": 0.001, "workers": 2, "step_s": 0.201, "wait_s": 0.200, "fetch_s": 0.4},
            "workers_would_speed_up",
            {"workers": 8, "speedup": pytest.approx(4.0, abs=0.05)},
        ),
        (
            {"cores": 1, "fetch_cpu_s": 0.001, "workers": 8, "step_s": 0.062, "wait_s": 0.050, "fetch_s": 0.4},
            "workers_exceed_the_machine",
            {"workers": 34},
        ),
        ({"cores": 1, "fetch_cpu_s": 0.02}, "workers_exceed_the_cores", {"workers": 3, "cores": 0}),
        (
            {"fetch_s": 0.0005, "step_s": 0.0012, "wait_s": 0.0005},
            "workers_would_keep_up",
            {"times": ms("0.50", "0.70"), "workers": 1},
        ),
    ],
)
def test_the_setting_that_helps(changes: dict[str, float], identity: str, fields: dict[str, Any]) -> None:
    says(replace(LOADS_ITSELF, **changes).advice(), identity, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "workers", "identity"),
    [(0, 0, "training_process_reads_the_rows"), (1, 1, "stream_has_one_worker"), (1, 0, "stream_has_one_worker")],
)
def test_workers_that_would_not_help_are_not_advised(most: int, workers: int, identity: str) -> None:
    says(replace(LOADS_ITSELF, step_s=0.037, most_workers=most, workers=workers, cores=16).advice(), identity)


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
    ("local_ranks", "identity", "workers"),
    [(1, "workers_would_keep_up", 3), (4, "workers_would_speed_up", 1)],
)
def test_the_ranks_of_a_machine_share_its_cores(local_ranks: int, identity: str, workers: int, tmp_path: Path) -> None:
    data: Any = SimpleNamespace(global_batch=64, workers=0, prefetch=2, most_workers=1_000)
    seen = TrainingRecord(step_s=[0.046] * 3, wait_s=[0.034] * 3, fetch_s=0.102, fetch_cpu_s=0.102)
    for rank in range(local_ranks):
        world = World(rank=rank, size=local_ranks, local_rank=rank, local_size=local_ranks)
        write(tmp_path / f"rank{rank}.json", RankRecord(rank, world, 1, 0.0, MACHINE, trainings={"run": seen}))
    found = measure_data_wait(data, Record(tmp_path))
    assert found
    says(found.advice(), identity, workers=workers)


@pytest.mark.check
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
    assert results["advice"]["id"] in ("workers_would_keep_up", "workers_would_speed_up")
    assert results["advice"]["fields"]["times"]["fields"]["work"]  # the rest of the loading is sleep
    assert f"of the time: {results['advice']['english']}" in done.stdout
