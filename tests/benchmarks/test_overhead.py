"""benchmarks/overhead.py: its statistics on planted differences, and one short run of the whole. Nothing is timed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402 - a script's folder is on the path when it runs
import turns  # noqa: E402
from budget import budget  # noqa: E402
from samestep.jobs import digits  # noqa: E402
from samestep.world import World  # noqa: E402

DEADLINE_IMPORTS = 200


def rounds_of(step_s, jitter, seed, launches=4, rounds=40):
    return step_s * (1 + jitter * np.random.default_rng(seed).standard_normal((launches, rounds)))


def test_a_slowdown_of_5_percent_is_not_met_and_its_size_is_told():
    other = rounds_of(0.004, 0.01, seed=1)
    found = overhead.compare(rounds_of(0.0042, 0.01, seed=2), other, goal=0.995)
    assert found.verdict == "not met"
    assert found.added_us[1] < 200 < found.added_us[2]
    assert found.ratio[1] < 1 / 1.05 < found.ratio[2]


def test_a_speedup_is_met():
    found = overhead.compare(rounds_of(0.0038, 0.01, seed=1), rounds_of(0.004, 0.01, seed=2), goal=1.0)
    assert found.verdict == "met"
    assert found.added_us[2] < 0 and found.ratio[1] > 1


def test_the_same_times_are_met_exactly():
    times = rounds_of(0.004, 0.1, seed=1)
    found = overhead.compare(times, times, goal=1.0)
    assert (found.added_us, found.ratio, found.verdict) == ((0, 0, 0), (1, 1, 1), "met")


@pytest.mark.parametrize("seed", range(20))
def test_equal_arms_are_never_not_met(seed):
    ours, other = rounds_of(0.004, 0.005, seed=2 * seed), rounds_of(0.004, 0.005, seed=2 * seed + 1)
    assert overhead.compare(ours, other, goal=0.995).verdict != "not met"


@pytest.mark.parametrize("goal", [0.995, 1.0])
def test_noise_is_not_resolved(goal):
    ours, other = rounds_of(0.004, 0.3, seed=1), rounds_of(0.004, 0.3, seed=2)
    assert overhead.compare(ours, other, goal).verdict == "not resolved"


def test_noise_that_a_round_shares_cancels():
    shared = rounds_of(1.0, 0.3, seed=1).clip(0.3)
    found = overhead.compare(0.0042 * shared, 0.004 * shared, goal=0.995)
    assert found.ratio == pytest.approx((1 / 1.05,) * 3)


def test_launches_that_differ_widen_the_interval():
    steady = rounds_of(0.0, 1.0, seed=1) + rounds_of(1.0, 0.01, seed=1)
    moved = steady + np.array([[-0.1], [-0.03], [0.03], [0.1]])

    def width(values):
        _, low, high = overhead.interval(values)
        return high - low

    assert width(moved) > 5 * width(steady)


def trained(fault=None):
    """The turn of a loop that trains in this process, with a fault planted."""
    job = digits.job(width=4, global_batch=64)

    def train(job, world, turn):
        model = turn.model()
        optimizer = job.optimizer.build(model)
        images, labels = job.train[: 32 if fault == "few rows" else 64]
        for number in range(turn.steps - 8 if fault == "ends early" else turn.steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            if fault != "stands still":
                optimizer.step()
            turn.step_ended(-loss if fault == "loss rises" else loss - number * 1e-3)  # it falls in any case
        return model.state_dict()

    turn = turns.Turn("planted", train, job, World(), rounds=2, block=8)
    for _ in range(turns.WARM_UP):
        turn.take()
    turn.warm()
    for _ in range(3):
        turn.take()
    return turn


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("few rows", "saw {32} rows, not 64"),
        ("stands still", "left 0.weight where it was"),
        ("loss rises", "loss rose"),
        ("ends early", "ended after 3.0 blocks"),
        ("ranks differ", "ranks differ in 0.weight"),
    ],
)
def test_an_arm_that_does_not_train_is_told(fault, told, monkeypatch):
    def all_gather(of_ranks, mine):
        for rank, tensor in enumerate(of_ranks):
            tensor.copy_(mine + rank + (fault == "ranks differ"))

    monkeypatch.setattr(turns.dist, "all_gather", all_gather)
    with pytest.raises(AssertionError, match=re.escape(told)):
        turns.check(trained(fault))


def test_an_arm_that_trains_passes(monkeypatch):
    monkeypatch.setattr(turns.dist, "all_gather", lambda of_ranks, mine: of_ranks[0].copy_(mine))
    turn = trained()
    turns.check(turn)
    assert [block.shape for block in turn.blocks] == [(7, 2)] * 2  # steps but the first; wall and CPU


def run(*arguments):
    """(exit code, standard error); the process and all that it started are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, BENCHMARKS / "overhead.py", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = []
    try:
        until = time.monotonic() + budget(DEADLINE_IMPORTS)
        while time.monotonic() < until:
            started += [p for p in psutil.Process(process.pid).children(recursive=True) if p not in started]
            try:
                _, errors = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            return process.returncode, errors
        pytest.fail(f"still running after {budget(DEADLINE_IMPORTS)} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        _, left = psutil.wait_procs(started, timeout=budget(DEADLINE_IMPORTS))
        for member in left:
            member.kill()
        assert not left


@pytest.mark.check
def test_a_short_run_counts_every_step_of_every_arm(tmp_path):
    file = tmp_path / "overhead.json"
    code, errors = run("--model", "small", "--launches", 1, "--rounds", 1, "--block", 8, "--json", file)
    assert code == 0, errors
    written = json.loads(file.read_text())
    small = written["models"]["small"]
    assert written["block"] == 8
    assert {"processor", "gpu", "cores", "ranks", "backend", "python", "versions"} == set(small["machine"])
    assert {"samestep", "handwritten", "handwritten_fast", "control"} <= set(small["arms"])
    for launches in small["arms"].values():
        for arm in launches:
            assert arm["steps"] == 3 * 8  # two blocks to warm up, one timed
            assert arm["rows_per_step"] == [64 // small["machine"]["ranks"]]
            assert arm["loss"][1] < arm["loss"][0]
            for clock in ("wall_s", "cpu_s"):
                assert np.shape(arm[clock]) == (1, 7) and np.min(arm[clock]) > 0  # [rounds, steps but the first]
        assert len(launches) == 1
    assert {"wall", "cpu"} <= set(small["comparisons"])
    for found in small["comparisons"].values():
        assert set(found) == set(small["arms"]) - {"samestep"}


@pytest.mark.full
def test_the_deadline_shows_stacks_and_leaves_nothing_behind():
    code, errors = run("--model", "wide", "--rounds", 1000, "--deadline", budget(5))
    assert code == 1
    assert "Timeout" in errors and "in rank_main" in errors
