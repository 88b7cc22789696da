"""Counts how often a forward pass calls the modules that an engine gathers, which each rank must call as often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from samestep.data.loader import Rows, to_device
from samestep.data.schedule import schedule_of
from samestep.job import Batch, Job, MicroBatch
from samestep.job.walk import without_graph
from samestep.records.inspection import VaryingCalls

ROWS = 4
MOST_ROWS = 16  # of a rank's own part, which is tried where it is no larger

Units = Callable[[nn.Module], list[nn.Module]]


def varying_calls(
    job: Job, model: Callable[[], nn.Module], units: Mapping[str, Units], replicas: int, device: str
) -> dict[str, VaryingCalls]:
    """Returns the engines -> their first unit that not every forward pass calls as often.

    units: engine -> the modules that its ranks gather when they are called. Nothing is said of a job whose functions
    raise on these rows: dry_step names the error.
    """
    found = {}
    for engine, units_of in units.items():
        try:
            net = model().to(device)
            if unit := _varying(job, net, units_of(net), replicas, device):
                found[engine] = unit
        except Exception:
            continue
    return found


def _varying(job: Job, model: nn.Module, units: list[nn.Module], replicas: int, device: str) -> VaryingCalls | None:
    """Compares the calls of each unit, first over batches of as many rows, then over others."""
    if not units:
        return None
    calls: Counter[nn.Module] = Counter()
    for unit in units:
        unit.register_forward_pre_hook(lambda module, inputs: calls.update([module]))
    names = {module: name for name, module in model.named_modules()}
    read, first = Rows(job), None
    for micro_batch in _micro_batches(job, replicas):
        calls.clear()
        data = to_device(read[micro_batch][1], device)
        for number, turn in enumerate(job.of_phases()):
            batch: Any = Batch(data, replace(micro_batch, phase=number))
            without_graph(turn.forward, model, batch)
        rows, counts = micro_batch.rows, [calls[unit] for unit in units]
        first = first or (rows, counts)
        for unit, count, before in zip(units, counts, first[1]):
            if count != before:
                return VaryingCalls(names[unit], "data" if rows == first[0] else "rows")
    return None


def _micro_batches(job: Job, replicas: int) -> list[MicroBatch]:
    """Returns batches of as many rows, the first twice, as a forward may draw; one with fewer; the ranks' last."""
    alone, ranks = schedule_of(job, 1), schedule_of(job, replicas)
    last = alone.steps_per_epoch - 1
    few = [_cut(alone.step(0, 0, step)[0], ROWS) for step in (0, 0, min(1, last))]
    micro_batches = [ranks.step(rank, 0, last)[0] for rank in (0, replicas - 1)]
    return [
        *few,
        _cut(few[0], max(1, few[0].rows - 1)),
        *(micro_batch for micro_batch in micro_batches if 0 < micro_batch.rows <= MOST_ROWS),
    ]


def _cut(micro_batch: MicroBatch, most: int) -> MicroBatch:
    rows = min(micro_batch.rows, most)
    return replace(micro_batch, indices=micro_batch.indices[:rows], rows=rows)
