"""What an engine's launches measured: speed, its ratio to one process, step times, peak memory and start-up time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.records.record import Record
from samestep.records.results import Launch, Measurement, StepTime, Summary
from samestep.records.training_record import TrainingRecord


@dataclass(frozen=True)
class Measured:
    """Which steps of a launch are measured, and how many rows each step has.

    warmup_steps: come first and are left out. measured_steps: come after them. global_batch, rows, steps_per_epoch: of
    the job; the last batch of an epoch may be smaller. phases: how many steps each batch is trained for.
    """

    warmup_steps: int
    measured_steps: int
    global_batch: int
    rows: int
    steps_per_epoch: int
    phases: int = 1

    def rows_in(self, step: int) -> int:
        """The rows of one step, over all ranks."""
        return min(self.global_batch, self.rows - step % self.steps_per_epoch // self.phases * self.global_batch)


def measurement(
    records: Sequence[Record], baseline: Sequence[Record], replicas: int, measured: Measured
) -> Measurement:
    """The figures of a proven engine's launches. `baseline`: the launches of one process, in the same rounds.

    ratio: its samples/s over the baseline's. efficiency: the ratio divided by the replicas (strong scaling: the global
    batch is the same on one replica and on N). Both are None without a baseline.
    """
    launches = [_launch(repeat, record, measured) for repeat, record in enumerate(records)]
    speeds = [launch.samples_per_second for launch in launches]
    one_process = [_launch(repeat, record, measured).samples_per_second for repeat, record in enumerate(baseline)]
    computed = [ms for launch in launches for ms in launch.compute_ms]
    return Measurement(
        samples_per_second=summary(speeds),
        ratio=ratios(speeds, one_process) if baseline else None,
        efficiency=ratios([speed / replicas for speed in speeds], one_process) if baseline else None,
        step_ms=StepTime(
            wait=statistics.median(ms for launch in launches for ms in launch.wait_ms),
            step=statistics.median(ms for launch in launches for ms in launch.step_ms),
            compute=statistics.median(computed) if computed else None,
        ),
        peak_memory_mib=max(launch.peak_memory_mib for launch in launches),
        startup_s=statistics.median(launch.startup_s for launch in launches),
        launches=launches,
        costs=[rank.cost for rank in records[0].training("measure") if rank.cost],
    )


def _launch(repeat: int, record: Record, measured: Measured) -> Launch:
    """One launch's figures, without the warm-up. Rank 0's clock is enough: ranks wait for each other at every step."""
    ranks = record.training("measure")
    first = measured.warmup_steps
    step_s, wait_s = ranks[0].step_s[first:], ranks[0].wait_s[first:]
    rows = sum(measured.rows_in(step) for step in range(first, first + measured.measured_steps))
    began_at, peaks = ranks[0].began_at, [rank.peak_memory_bytes for rank in ranks]
    assert began_at is not None  # a training with steps has seen a batch
    return Launch(
        repeat=repeat,
        samples_per_second=rows / sum(step_s),
        step_ms=[1e3 * s for s in step_s],
        wait_ms=[1e3 * s for s in wait_s],
        losses=_losses(ranks),
        peak_memory_mib=max(peak for peak in peaks if peak is not None) / 2**20,
        startup_s=began_at - record.ranks[0].started_at,
        compute_ms=[1e3 * s for s in ranks[0].busy_s[first:]] if record.ranks[0].world.device == "cpu" else [],
    )


def _losses(ranks: Sequence[TrainingRecord]) -> list[float]:
    """The global batch's mean loss at every step, warm-up included."""
    sums: dict[int, list[float]] = {}  # step -> [loss times weight, weight]
    for rank in ranks:
        for step, loss, weight in zip(rank.step_of, rank.losses, rank.weight_of):
            of_step = sums.setdefault(step, [0.0, 0.0])
            of_step[0] += loss * weight
            of_step[1] += weight
    return [total / weight for _, (total, weight) in sorted(sums.items())]


RESAMPLES = 2000


def summary(values: Sequence[float]) -> Summary:
    """The median of `values` with its 95 % bootstrap interval (percentile method).

    The interval cannot reach beyond the smallest and the largest value; with five values or fewer it reaches both.
    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    sample = np.asarray(values, dtype=np.float64)
    resampled = np.random.default_rng(0).choice(sample, size=(RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return Summary(median=float(np.median(sample)), low=float(low), high=float(high), n=len(sample))


def ratios(over: Sequence[float], under: Sequence[float]) -> Summary:
    """The summary of over[i] / under[i]. Launches of one round are paired because the machine drifts between rounds."""
    return summary([a / b for a, b in zip(over, under)])
