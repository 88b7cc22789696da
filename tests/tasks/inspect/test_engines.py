"""What the docs say of which engines take which jobs is what the engines say of themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from command import TESTS
from inspected_job import inspected_job
from samestep.engine import Layout
from samestep.job import Job
from samestep.message import Message, message
from samestep.tasks.inspect.engines import EngineDemands, inspect_engines

DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.mark.parametrize(
    ("trap", "takes"),
    [
        ("A parameter without a gradient", lambda layout: not layout.every_gradient),
        ("An optimizer whose step needs a closure", lambda layout: layout.closures),
        ("A scalar parameter", lambda layout: layout.no_scalars),
    ],
)
def test_the_traps_name_the_engines(trap: str, takes: Callable[[Layout], bool]) -> None:
    engines = [row for row in inspect_engines(("cpu",), 2, {}, []) if row.layout]
    known = {row.name for row in engines}
    expected = {row.name for row in engines if row.layout and takes(row.layout)}
    section = DOCS.read_text().partition("## Traps that every engine handles")[2].partition("\n## ")[0]
    (told,) = [item for item in re.split(r"\n- ", section) if item.startswith(trap)]
    assert {name for name in re.findall(r"`(\w+)`", told) if name in known} == expected


def test_an_engine_whose_plan_fails_does_not_hide_the_others() -> None:
    def failing(job: Job) -> Message:
        raise KeyError("blocks")

    def dividing(job: Job) -> Message:
        return message("pipeline_is_whole")

    job = f"{TESTS}/mutations/jobs.py:warming"
    facts = inspected_job(job, {}, 2, engines=EngineDemands(divides={"failing": failing, "dividing": dividing}))
    assert facts.refusals.undivided["failing"].fields["error"] == "KeyError: 'blocks'"
    assert facts.divided["dividing"].id == "pipeline_is_whole"
