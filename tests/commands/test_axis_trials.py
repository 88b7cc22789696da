"""verify names the axis and the module of what is wrong on a mesh; of a healthy engine nothing is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget, deadline
from command import TESTS
from mutations.faults import Fault
from mutations.plant import patched
from mutations.test_divided_models import FAULTS, HEALTHY
from samestep.launch.fork_client import SOCKETS
from samestep.records.origin import Origin
from samestep.records.results import RESULTS, CompareResults, read_results

FAULTY = next(fault for fault in FAULTS if fault.name == "tensor: the parts of an output averaged, not added up")


def located(fault: Fault, folder: Path) -> tuple[str, Origin | None]:
    """The verdict on a job with a fault in the package, and where it is."""
    job = f"{TESTS}/mutations/jobs.py:{fault.jobs[0]}"
    words = ["verify", job, "--engine", fault.engine, "--mesh", fault.mesh, "--quick", "--out", str(folder / "out")]
    # Without the fork servers of the tests, which have the package without the fault.
    environment = {name: value for name, value in os.environ.items() if name != SOCKETS}
    environment["PYTHONPATH"] = f"{patched(fault, folder)}:{TESTS}"
    command = [sys.executable, "-m", "samestep", *words, *deadline()]
    subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=budget(150), check=False)
    assert (folder / "out" / RESULTS).exists()
    (row,) = read_results(CompareResults, folder / "out").engines
    return row.verdict, row.origin


@pytest.mark.check
def test_what_is_wrong_has_an_axis_and_a_module(tmp_path: Path) -> None:
    verdict, origin = located(FAULTY, tmp_path)
    assert verdict == "differs" and origin
    assert (origin.axes, origin.module) == (("tensor",), "blocks.0.project")
    assert [trial.differs for trial in origin.trials] == [True, False, False, True]


@pytest.mark.full
def test_nothing_is_tried_of_what_is_right(tmp_path: Path) -> None:
    assert located(HEALTHY[0], tmp_path) == ("same", None)
    assert not [folder for folder in (tmp_path / "out" / "launches").iterdir() if folder.name.endswith("-parts")]
