"""What a row's launches measured: speed, its ratio to one process, the step's split, memory and start-up time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.records.record import Record
from samestep.report.figures.stats import ratios, summary

FIGURES = ("samples_per_second", "ratio", "efficiency", "step_ms", "peak_memory_mib", "startup_s")


def without_measurement() -> dict[str, Any]:
    """The figures of a row that was not proven: none."""
    return dict.fromkeys(FIGURES) | {"launches": []}


@dataclass(frozen=True)
class Measured:
    """Which steps of a launch count, and how many rows each has. warmup_steps: left out; measured_steps: after them.

    global_batch, rows, steps_per_epoch: of the job; its epoch's last batch may be smaller.
    """

    warmup_steps: int
    measured_steps: int
    global_batch: int
    rows: int
    steps_per_epoch: int

    def rows_in(self, step: int) -> int:
        """Rows of the whole step, over all ranks."""
        return min(self.global_batch, self.rows - step % self.steps_per_epoch * self.global_batch)


def measurement(
    records: Sequence[Record], baseline: Sequence[Record], replicas: int, measured: Measured
) -> dict[str, Any]:
    """The figures of a proven engine's launches. `baseline`: the launches of one process, of the same rounds.

    ratio: its samples/s over the baseline's. efficiency: that, divided by the replicas (strong scaling: the global
    batch is the same on one and on N). Both None without a baseline.
    """
    launches = [_launch(record, measured) for record in records]
    speeds = [launch["samples_per_second"] for launch in launches]
    figures: dict[str, Any] = {
        "samples_per_second": summary(speeds),
        "ratio": None,
        "efficiency": None,
        "step_ms": {
            "wait": statistics.median(ms for launch in launches for ms in launch["wait_ms"]),
            "step": statistics.median(ms for launch in launches for ms in launch["step_ms"]),
        },
        "peak_memory_mib": max(launch["peak_memory_mib"] for launch in launches),
        "startup_s": statistics.median(launch["startup_s"] for launch in launches),
        "launches": [{"repeat": number, **launch} for number, launch in enumerate(launches)],
    }
    if baseline:
        alone = [_launch(record, measured)["samples_per_second"] for record in baseline]
        figures["ratio"] = ratios(speeds, alone)
        figures["efficiency"] = ratios([speed / replicas for speed in speeds], alone)
    return figures


def _launch(record: Record, measured: Measured) -> dict[str, Any]:
    """One launch's figures, warm-up left out. Rank 0's clock: the ranks wait for each other at every step."""
    ranks = record.training("measure")
    first = measured.warmup_steps
    step_s, wait_s = ranks[0]["step_s"][first:], ranks[0]["wait_s"][first:]
    rows = sum(measured.rows_in(step) for step in range(first, first + measured.measured_steps))
    return {
        "samples_per_second": rows / sum(step_s),
        "step_ms": [1e3 * s for s in step_s],
        "wait_ms": [1e3 * s for s in wait_s],
        "losses": _losses(ranks),
        "peak_memory_mib": max(rank["peak_memory_bytes"] for rank in ranks) / 2**20,
        "startup_s": ranks[0]["began_at"] - record.ranks[0]["started_at"],
    }


def _losses(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The global batch's mean loss at every step, warm-up included."""
    sums: dict[int, list[float]] = {}
    for rank in ranks:
        for step, loss, weight in zip(rank["step_of"], rank["losses"], rank["weight_of"]):
            at = sums.setdefault(step, [0.0, 0.0])
            at[0] += loss * weight
            at[1] += weight
    return [total / weight for _, (total, weight) in sorted(sums.items())]
