"""One set of results for every test of the report: each verdict once, and what a real comparison holds."""

from __future__ import annotations

import math
from copy import deepcopy
from random import Random
from typing import Any

import pytest

Results = dict[str, Any]


def summary(middle: float, n: int = 5) -> dict[str, Any]:
    return {"median": middle, "low": middle * 0.97, "high": middle * 1.02, "n": n}


def launch(repeat: int, step_ms: float, seed: int = 0, wrong: float = 0.0) -> dict[str, Any]:
    """60 steps around `step_ms`, a slow one now and then, and a loss that falls; `seed` draws other noise on it."""
    random = Random(f"{repeat} {step_ms}")
    times = [
        step_ms * random.lognormvariate(0.02 * repeat - 0.04, 0.04) * random.choice([1] * 40 + [2.2]) for _ in range(60)
    ]
    noise = Random(seed)
    losses = [2.1 * math.exp(-i / 25) + 0.25 + 0.08 * noise.gauss(0, 1) + wrong * min(i, 30) / 30 for i in range(60)]
    return {
        "repeat": repeat,
        "samples_per_second": 64e3 / step_ms,
        "step_ms": times,
        "wait_ms": [0.12] * 60,
        "losses": losses,
    }


def row(engine: str, launcher: str, verdict: str, **rest: Any) -> dict[str, Any]:
    """A row without a measurement."""
    return {
        "engine": engine,
        "launcher": launcher,
        "verdict": verdict,
        "bitwise": False,
        "replicas": 2,
        "max_difference": None,
        "bound": None,
        "first_divergence": None,
        "reason": None,
        "notes": [],
        "samples_per_second": None,
        "ratio": None,
        "efficiency": None,
        "step_ms": None,
        "peak_memory_mib": None,
        "startup_s": None,
        "launches": [],
    } | rest


def measured(
    engine: str, launcher: str, verdict: str, step_ms: float, seed: int = 0, wrong: float = 0.0, **rest: Any
) -> dict[str, Any]:
    """A row with five launches; one process takes 19.2 ms a step."""
    replicas = rest.get("replicas", 2)
    return (
        row(engine, launcher, verdict)
        | {
            "samples_per_second": summary(64e3 / step_ms),
            "ratio": summary(19.2 / step_ms),
            "efficiency": summary(19.2 / step_ms / replicas),
            "step_ms": {"wait": 0.12, "step": step_ms},
            "peak_memory_mib": 398.4,
            "startup_s": 4.62,
            "launches": [launch(repeat, step_ms, seed, wrong) for repeat in range(5)],
        }
        | rest
    )


@pytest.fixture
def results() -> Results:
    """What a comparison gives."""
    divergence = {
        "training": "sgd",
        "step": 3,
        "quantity": "loss",
        "tensor": None,
        "rank": 1,
        "expected": 2.302585092994046,
        "found": 2.302585092994057,
        "cause": "the update of step 2 is wrong: averaged per rank instead of per row",
    }
    one_row = "step 23: rank 1 gets 1 row, BatchNorm needs 2; set global_batch=… so that all ranks get 2, or last=drop"
    return {
        "schema": 1,
        "samestep": "0.1.0",
        "job": "digits",
        "settings": {"lr": "0.05", "width": "64"},
        "world_size": 2,
        "global_batch": 64,
        "rows": 1500,
        "device": "cpu",
        "machine": {
            "python": "3.11.9",
            "torch": "2.13.0",
            "host": "workstation",
            "processor": "x86_64",
            "cores": 8,
            "gpu": None,
        },
        "started": "2026-11-20T23:59:00",
        "command": "samestep compare digits --set lr=0.05 --set width=64",
        "repeats": 5,
        "warmup_steps": 20,
        "measured_steps": 60,
        "threads_per_rank": 1,
        "workers": 0,
        "dtype": "float32",
        "proof": {"steps": 8, "dtype": "float64", "float64_failed": None},
        "same_as_one_process": {
            "same": False,
            "reason": "BatchNorm (1) normalises over each replica's own rows; dropout (7) draws another mask",
        },
        "engines": [
            measured(
                "single",
                "process",
                "same",
                19.2,
                seed=1,
                bitwise=True,
                replicas=1,
                max_difference=0.0,
                bound=1e-15,
            ),
            measured("ddp", "torchrun", "same", 12.3, bitwise=True, max_difference=0.0, bound=1.2e-15),
            measured("ddp", "spawn", "same", 12.6, bitwise=True, max_difference=0.0, bound=1.2e-15),
            measured(
                "fsdp",
                "torchrun",
                "same",
                15.1,
                max_difference=2.2e-16,
                bound=1.2e-15,
                notes=["clipping never acted in the proof: the largest gradient norm was 3.2, not 5.0"],
            ),
            measured("amp", "torchrun", "approximate", 10.9, wrong=0.02, max_difference=7.7e-5, bound=2.0e-4),
            measured(
                "lightning",
                "torchrun",
                "differs",
                9.0,
                wrong=0.6,
                max_difference=1.1e-2,
                bound=1.2e-15,
                first_divergence=divergence,
            ),
            row("horovod", "horovodrun", "failed", reason="rank 1 was killed (signal 9) in step 12"),
            row("deepspeed", "torchrun", "refused", reason=one_row),
            row("dataparallel", "process", "unavailable", reason="no-op on CPU", replicas=1),
        ],
    }


@pytest.fixture
def proof(results: Results) -> Results:
    """What verify alone gives: the same without any measurement."""
    alone = deepcopy(results)
    timing = ("samples_per_second", "ratio", "efficiency", "step_ms", "peak_memory_mib", "startup_s", "launches")
    for engine in alone["engines"]:
        for key in timing:
            del engine[key]
    for key in ("repeats", "warmup_steps", "measured_steps"):
        del alone[key]
    return alone | {"command": "samestep verify digits"}
