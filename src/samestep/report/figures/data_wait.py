"""Where the time of a step goes: how long it waited for data, which setting would shorten that, and what computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from samestep.message import Message, message
from samestep.records.training_record import TrainingRecord

LEAST_SHARE = 0.05  # of the time; waiting less than this needs no advice
LEAST_SPEEDUP = 1.1  # more workers that make training less than this many times as fast are not advised
BURST_MARGIN = 1.1  # workers that load this many times the rows trained on should not make it wait; bursts do
IDLE_SHARE = 0.25  # loading that computes for less of its time than this waits for a disk or a network
IDLE_WORKERS_PER_CORE = 8  # so many workers that mostly wait can share a core


@dataclass(frozen=True)
class Waiting:
    """How data arrived, per rank and step: means over the training.

    step_s: seconds of a step, waiting included. wait_s: those of them spent waiting for data. fetch_s: seconds that one
    process took to load the step's rows; fetch_cpu_s: those of them on a processor, None: all. rows: of a step, on all
    ranks. workers: loader processes per rank; 0: the training process loads. prefetch: batches that each loads ahead.
    cores: of the machine, per rank. most_workers: more than these would not load faster. of_script: whether settings
    are arguments of a DataLoader, and not those of a job.
    """

    step_s: float
    wait_s: float
    fetch_s: float
    rows: float
    workers: int
    prefetch: int
    cores: float
    most_workers: int = 1_000
    fetch_cpu_s: float | None = None
    of_script: bool = False

    @property
    def share(self) -> float:
        """The part of the time that was spent waiting for data, 0 to 1."""
        return self.wait_s / self.step_s if self.step_s else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of a step without its wait for data."""
        return max(self.step_s - self.wait_s, 1e-6)

    @property
    def demand(self) -> float:
        """Rows per second that all ranks would train on if they never waited."""
        return self.rows / self.compute_s

    @property
    def loader_ceiling(self) -> float | None:
        """Rows per second that the loading processes of all ranks can deliver; None where nothing was measured."""
        return self.rows * max(1, self.workers) / self.fetch_s if self.fetch_s else None

    def advice(self) -> Message | None:
        """Returns which setting would help; None where waiting takes at most LEAST_SHARE of the time."""
        if self.share <= LEAST_SHARE:
            return None
        cpu_s = self.fetch_s if self.fetch_cpu_s is None else self.fetch_cpu_s
        idle = cpu_s < IDLE_SHARE * self.fetch_s
        work = _ms(cpu_s) if idle else None
        times = message("times_of_loading_and_step", loading=_ms(self.fetch_s), work=work, step=_ms(self.compute_s))
        # One core trains. A worker that mostly waits needs no core of its own.
        free = min(int(self.cores * IDLE_WORKERS_PER_CORE) if idle else int(self.cores) - 1, self.most_workers)
        needed = max(ceil(self.fetch_s / self.compute_s), self.workers + 1)
        if self.workers and self.fetch_s * BURST_MARGIN <= self.compute_s * self.workers:
            return message(
                "data_comes_in_bursts",
                times=times,
                workers=self.workers,
                **self._setting("prefetch", 2 * self.prefetch),
            )
        best = min(needed, free)
        speedup = self.step_s / max(self.compute_s, self.fetch_s / max(1, best))
        if self.workers < best == needed:
            return message("workers_would_keep_up", times=times, workers=best, **self._setting("setting", best))
        if self.workers < best and speedup >= LEAST_SPEEDUP:
            return message(
                "workers_would_speed_up", times=times, workers=best, speedup=speedup, **self._setting("setting", best)
            )
        if not self.most_workers:
            return message("training_process_reads_the_rows", times=times)
        if needed > self.most_workers:
            return message("stream_has_one_worker", times=times)
        if idle:
            return message("workers_exceed_the_machine", times=times, workers=needed)
        return message("workers_exceed_the_cores", times=times, workers=needed, cores=max(0, free))

    def _setting(self, name: str, value: int) -> dict[str, int]:
        """Returns the field of a setting: 'argument' where it is a DataLoader's."""
        return {"argument" if self.of_script else name: value}


def measured(
    ranks: Sequence[TrainingRecord],
    rows_per_step: float,
    workers: int,
    prefetch: int,
    cores_per_rank: float,
    most_workers: int = 1_000,
) -> Waiting | None:
    """The means over all ranks' steps; None for a training without steps.

    The first step is left out where there are others: it waits for the loader processes to start.
    """
    steps = [times for record in ranks for times in list(zip(record.step_s, record.wait_s))[1:]]
    steps = steps or [times for record in ranks for times in zip(record.step_s, record.wait_s)]
    if not steps:
        return None
    step_s, wait_s = (sum(times) / len(steps) for times in zip(*steps))
    all_steps = sum(len(record.step_s) for record in ranks)
    return Waiting(
        step_s=step_s,
        wait_s=wait_s,
        fetch_s=sum(record.fetch_s for record in ranks) / all_steps,
        rows=rows_per_step,
        workers=workers,
        prefetch=prefetch,
        cores=cores_per_rank,
        most_workers=most_workers,
        fetch_cpu_s=sum(record.fetch_cpu_s for record in ranks) / all_steps,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 2}f} ms"


@dataclass(frozen=True)
class StepParts:
    """Mean milliseconds of a rank's steps. wait: for data. compute: in which the training thread was on a processor.
    other: the rest: collectives and the ranks that they wait for, and processors that others use."""

    rank: int
    steps: int
    step: float
    wait: float
    compute: float
    other: float


def step_parts(ranks: Sequence[TrainingRecord], first: int = 1) -> list[StepParts]:
    """Returns each rank's means. first: steps that are left out, where there are more."""
    return [_parts(rank, record, first) for rank, record in enumerate(ranks) if record.busy_s]


def _parts(rank: int, record: TrainingRecord, first: int) -> StepParts:
    first = first if len(record.step_s) > first else 0
    count = len(record.step_s) - first
    step, wait, busy = (1e3 * sum(times[first:]) / count for times in (record.step_s, record.wait_s, record.busy_s))
    compute = min(busy, step - wait)  # clocks differ by microseconds
    return StepParts(rank, count, step, wait, compute, max(0.0, step - wait - compute))
