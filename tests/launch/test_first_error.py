"""Whose fault it was, as each launcher reports it: recorded from real launches in which rank 1 was killed, or left."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from samestep import launch
from samestep.commands.cli import app
from samestep.launch import Machines
from samestep.launch.command import command_for
from samestep.launch.first_error import doctor_line, exited_rank, killed_rank

RECORDED = Path(__file__).parent / "recorded"


REPORTS = {name: launcher.report for name, launcher in launch.all_launchers().items()}
REPORTING = sorted(name for name, report in REPORTS.items() if report.killed or report.exited)
EVERY = pytest.mark.parametrize("launcher", REPORTING)


@EVERY
def test_a_killed_rank_is_found(launcher: str) -> None:
    log = (RECORDED / f"{launcher}-killed.txt").read_text()
    assert killed_rank(log, [launcher]) == (1, "SIGKILL")
    assert exited_rank(log, [launcher]) is None
    assert killed_rank(log, launch.names()) == (1, "SIGKILL")  # of a user's command


@EVERY
def test_a_rank_that_left_is_found(launcher: str) -> None:
    log = (RECORDED / f"{launcher}-left.txt").read_text()
    assert exited_rank(log, [launcher]) == (1, 7)
    assert killed_rank(log, [launcher]) is None


def test_only_the_launcher_that_was_used_is_believed() -> None:
    log = (RECORDED / "mpirun-killed.txt").read_text()
    assert killed_rank(log, ["torchrun"]) is None
    command = command_for(Path("/r/plan.json"), "spawn", 2, ["cpu"], Machines())
    assert command.launchers == ("spawn",)


@pytest.mark.parametrize(
    ("line", "killed", "exited"),
    [
        ("srun: error: h1: task 1: Killed", (1, "SIGKILL"), None),
        ("srun: error: h2: task 12: Segmentation fault (core dumped)", (12, "SIGSEGV"), None),
        ("srun: error: h2: tasks 2-3: Aborted", (2, "SIGABRT"), None),
        ("srun: error: h2: task 3: Bus error", (3, "SIGBUS"), None),
        ("srun: error: h2: tasks 2-3: Exited with exit code 7", None, (2, 7)),
        ("srun: error: h2: tasks 0,4-6: Exited with exit code 134", None, (0, 134)),
        ("srun: error: h2: task 2: Terminated", None, None),  # by srun itself, after another
        ("slurmstepd: error: *** STEP 1.0 ON h1 CANCELLED AT 2026-11-22T06:00:00 ***", None, None),
    ],
)
def test_sruns_words(line: str, killed: tuple[int, str] | None, exited: tuple[int, int] | None) -> None:
    assert (killed_rank(line, ["srun"]), exited_rank(line, ["srun"])) == (killed, exited)


def test_every_launcher_that_reports_is_recorded() -> None:
    assert {re.sub("-.*", "", path.stem) for path in RECORDED.iterdir()} == {*REPORTING}
    assert len(REPORTING) >= 6


@pytest.mark.parametrize(
    ("machines", "size", "line"),
    [
        (Machines(), 1, "samestep doctor"),
        (Machines(), 4, "samestep doctor --nproc 4"),
        (
            Machines(nnodes=2, master="h0", port=29500),
            4,
            "samestep doctor --nnodes 2 --nproc 4 --master-addr h0 --port 29500",
        ),
        (
            Machines(nnodes=2, master="h0", port=29500, node_rank=1),
            1,
            "samestep doctor --nnodes 2 --nproc 1 --master-addr h0 --port 29500 --node-rank N",
        ),
        (Machines(port=29500), 2, "samestep doctor --nproc 2 --port 29500"),
        (Machines(nnodes=2, single_launch=True), 8, "samestep doctor --launcher srun --nproc 4"),
        (
            Machines(nnodes=2, single_launch=True, hosts=("h1", "h2"), port=29500),
            8,
            "samestep doctor --launcher srun --nproc 4 --hosts h1,h2 --port 29500",
        ),
    ],
)
def test_the_doctor_is_named_with_the_options(machines: Machines, size: int, line: str) -> None:
    said = doctor_line(size, machines, ("srun",))
    assert said.fields == {"command": line}
    assert (said.id == "run_the_doctor_on_each_machine") == ("--master-addr" in line)
    words = shlex.split(line.partition("samestep doctor")[2].replace("--node-rank N", "--node-rank 1"))
    command = cast(Any, typer.main.get_command(app)).commands["doctor"]
    assert command.make_context("doctor", words).params["nproc"] in (None, size, size // machines.nnodes)
