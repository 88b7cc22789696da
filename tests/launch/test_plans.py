"""Launchers are pure: text in, text out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from samestep import launch
from samestep.errors import UserError

PROGRAM = ("-m", "samestep.worker", "plan.json")
SHAPE = launch.Shape(nproc=2, folder="/runs/a", port=0)

GOLDEN = {
    "horovodrun": (
        (
            str(Path(sys.executable).with_name("horovodrun")),
            "-np",
            "2",
            "-H",
            "localhost:2",
            "--gloo",
            sys.executable,
            "-m",
            "samestep.worker",
            "plan.json",
        ),
        {"SAMESTEP_INIT_METHOD": "file:///runs/a/rendezvous"},
    ),
    "process": ((sys.executable, "-m", "samestep.worker", "plan.json"), {}),
    "spawn": (
        (sys.executable, "-m", "samestep.worker", "--spawn", "2", "plan.json"),
        {"SAMESTEP_INIT_METHOD": "file:///runs/a/rendezvous"},
    ),
    "torchrun": (
        (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
            "--monitor-interval=0.05",
            "--log-dir=/runs/a/torchrun",
            "--no-python",
            sys.executable,
            "-m",
            "samestep.worker",
            "plan.json",
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", launch.names())
def test_plan(name: str) -> None:
    plan = launch.load(name).plan(PROGRAM, SHAPE)
    assert (plan.argv, dict(plan.env)) == GOLDEN[name]


def test_spawn_meets_at_the_asked_port() -> None:
    plan = launch.load("spawn").plan(PROGRAM, launch.Shape(2, "/runs/a", 29500))
    assert plan.env["SAMESTEP_INIT_METHOD"] == "tcp://127.0.0.1:29500"


def test_an_unknown_launcher_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no launcher 'torchrn'; did you mean 'torchrun'"):
        launch.load("torchrn")


def test_horovodrun_takes_no_port() -> None:
    with pytest.raises(UserError, match="horovodrun chooses its ports itself"):
        launch.load("horovodrun").plan(PROGRAM, launch.Shape(2, "/runs/a", 29500))
