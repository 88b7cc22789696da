"""The reference computes each rank's rows by code of its own, and gets the same rows as the engines' schedule."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.jobs_job import ordered
from samestep.data.schedule import schedule_of
from samestep.engine import Layout
from samestep.records.plan import ProveTask
from samestep.reference.schedule import step_rows
from samestep.tasks.proof_job import proof_job

SMALL = ProveTask("sgd", 8, "float64", 3, 0.05)


@pytest.mark.parametrize("kind", ["weighted", "few", "lengths", "lanes", "function"])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_reference_has_the_same_rows(kind: Any, last: str) -> None:
    for job in (ordered(kind, last), proof_job(ordered(kind, last), SMALL)):
        schedule = schedule_of(job, 3)
        for step in range(3 * schedule.steps_per_epoch):
            planned = [schedule.step(rank, *divmod(step, schedule.steps_per_epoch)) for rank in range(3)]
            rows = [[part[micro].indices[: part[micro].rows].tolist() for part in planned] for micro in range(1)]
            assert rows == step_rows(job, Layout(3), step)
