"""How much of its time a training waited for data, and which knob would help: pure functions of measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

WORTH_A_WORD = 0.05  # of the time
BURSTY = 1.1  # workers that could load this many times what is trained on, and yet it waits
WORTH_A_KNOB = 1.1  # times as fast
IDLE = 0.25  # loading that works for less of its time than this waits itself; more may be for want of a core
MOST_A_CORE = 8  # such workers on each core


@dataclass(frozen=True)
class Waiting:
    """What was measured, per rank and step, in means over the training.

    step_s: seconds of a step, waiting included. wait_s: of these, waiting for data. fetch_s: what loading the step's
    rows took, in the one process that did it; fetch_cpu_s: of these, how long a processor worked. rows: of a step, on
    all ranks. workers: loader processes per rank; 0: the training process loads. prefetch: batches that each loads
    ahead. cores: of the machine, per rank. most_workers: that would load more than fewer do.
    """

    step_s: float
    wait_s: float
    fetch_s: float
    rows: float
    workers: int
    prefetch: int
    cores: float
    most_workers: int = 1_000
    fetch_cpu_s: float | None = None  # None: all of fetch_s

    @property
    def share(self) -> float:
        """The part of the time that was spent waiting for data, 0 to 1."""
        return self.wait_s / self.step_s if self.step_s else 0.0

    @property
    def alone_s(self) -> float:
        """Seconds of a step whose data is there already."""
        return max(self.step_s - self.wait_s, 1e-6)

    @property
    def demand(self) -> float:
        """Rows per second that all ranks would train on if they never waited."""
        return self.rows / self.alone_s

    @property
    def loader_ceiling(self) -> float | None:
        """Rows per second that the loading processes of all ranks can deliver; None where nothing was measured."""
        return self.rows * max(1, self.workers) / self.fetch_s if self.fetch_s else None

    def advice(self) -> str | None:
        """One sentence: which knob would help. None where waiting takes less than WORTH_A_WORD of the time."""
        if self.share <= WORTH_A_WORD:
            return None
        works = self.fetch_s if self.fetch_cpu_s is None else self.fetch_cpu_s
        idle = works < IDLE * self.fetch_s
        for_what = f", most of it waiting for a disk or a network ({_ms(works)} of work)," if idle else ""
        facts = f"loading a batch takes {_ms(self.fetch_s)}{for_what} and a step {_ms(self.alone_s)}"
        # One core trains, and a worker that only waits needs none of its own.
        free = min(int(self.cores * MOST_A_CORE) if idle else int(self.cores) - 1, self.most_workers)
        needed = max(ceil(self.fetch_s / self.alone_s), self.workers + 1)
        if self.workers and self.fetch_s * BURSTY <= self.alone_s * self.workers:
            more = f"--set prefetch={2 * self.prefetch}"
            keeps = f"{_count(self.workers)} keep{'s' if self.workers == 1 else ''} up on average"
            return f"{facts}: {keeps}, but data comes in bursts; {more} loads further ahead"
        best = min(needed, free)
        faster = self.step_s / max(self.alone_s, self.fetch_s / max(1, best))
        if self.workers < best and (best == needed or faster >= WORTH_A_KNOB):
            gain = "would keep up" if best == needed else f"would make training {faster:.1f} times as fast"
            return f"{facts}: {_count(best)} {gain}; --set workers={best}"
        if not self.most_workers:
            return f"{facts}: rows are indexed in the training process; smaller ones, uint8 for pixels, take less time"
        if needed > self.most_workers:
            return (
                f"{facts}: a stream is read by one worker; make reading cheaper, or prepare samestep.data.arrays once"
            )
        if idle:
            more = f"{_count(needed)} would keep up, more than this machine bears"
            return f"{facts}: {more}; read from nearer, or in larger pieces"
        cores = f"{max(0, free)} core{'' if free == 1 else 's'}"
        why = f"{_count(needed)} would keep up, and each rank has {cores} beside the one that trains"
        return f"{facts}: {why}; make loading cheaper: smaller images, fewer augmentations, or arrays prepared once"


def measured(
    ranks: Sequence[Mapping[str, Any]],
    rows_per_step: float,
    workers: int,
    prefetch: int,
    cores_per_rank: float,
    most_workers: int = 1_000,
) -> Waiting | None:
    """What the records of all ranks come to; None for a training without steps.

    The first step is left out where there are others: it waits for the loader processes to start.
    """
    steps = [(step, wait) for seen in ranks for step, wait in list(zip(seen["step_s"], seen["wait_s"]))[1:]]
    steps = steps or [(step, wait) for seen in ranks for step, wait in zip(seen["step_s"], seen["wait_s"])]
    if not steps:
        return None
    all_steps = sum(len(seen["step_s"]) for seen in ranks)
    fetched = sum(seen.get("fetch_s", 0.0) for seen in ranks) / all_steps
    worked = sum(seen.get("fetch_cpu_s", seen.get("fetch_s", 0.0)) for seen in ranks) / all_steps
    step_s, wait_s = (sum(times) / len(steps) for times in zip(*steps))
    return Waiting(step_s, wait_s, fetched, rows_per_step, workers, prefetch, cores_per_rank, most_workers, worked)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 2}f} ms"


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"
