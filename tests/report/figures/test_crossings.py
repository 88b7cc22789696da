"""At which bandwidth engines are expected to change places."""

from __future__ import annotations

import pytest

from samestep.records.costs import PeakMemory, StepCost
from samestep.records.results import EngineResult, StepTime
from samestep.report.figures.crossings import crossings


def row(engine: str, step_ms: float | None, *sent: int) -> EngineResult:
    nothing = PeakMemory(0, 0, 0, 0, 0)
    costs = [StepCost(nothing, {"data": size} if size else {}) for size in sent]
    timed = StepTime(wait=0.0, step=step_ms) if step_ms else None
    return EngineResult("same", engine=engine, launcher="torchrun", step_ms=timed, costs=costs)


def test_the_faster_engine_that_sends_more_falls_behind() -> None:
    """10 ms less a step, 1,250,000 bytes more: sending these takes 10 ms at 1 Gbit/s."""
    rows = [row("single", 5.0, 0), row("tensor", 20.0, 2_250_000, 2_000_000), row("pipeline", 30.0, 1_000_000)]
    (found,) = crossings(rows)
    assert (found.first.engine, found.second.engine) == ("tensor", "pipeline")
    assert (found.bits_per_second, found.more_bytes, found.faster_s) == (
        pytest.approx(1e9),
        1_250_000,
        pytest.approx(0.01),
    )


@pytest.mark.parametrize(
    "rows",
    [
        [row("ddp", 20.0, 1000), row("fsdp", 30.0, 1500)],  # slower here, and over every slower link
        [row("ddp", 20.0, 1500), row("fsdp", 20.5, 1000)],  # as fast, but for chance
        [row("ddp", 20.0, 1500), row("single", 40.0, 0)],  # one process sends nothing, whatever the link
        [row("ddp", None, 1500), row("fsdp", 30.0, 1000)],
        [row("ddp", 20.0), row("horovod", 30.0)],  # nobody has looked
    ],
)
def test_others_do_not_change_places(rows: list[EngineResult]) -> None:
    assert crossings(rows) == []
