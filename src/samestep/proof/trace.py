"""Trace: one training as the judge reads it, the same whether an engine trained it or the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samestep.records.record import (
    EvaluationRecord,
    MicroBatchRecord,
    Record,
    ReferenceLayoutRecord,
    ReferenceTrainingRecord,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    State = Mapping[str, NDArray[Any]]


EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Part:
    """What one process saw of one micro-batch. loss_sum: the unscaled mean loss times the rows' weight."""

    epoch: int
    step: int
    micro: int
    indices: list[int]
    digests: list[str]
    weight: float
    loss_sum: float


@dataclass(frozen=True)
class Trace:
    """One training, of an engine or of the reference, as the judge reads it.

    parts: [process][micro-batch in order]. start: per process, a digest of its first weights.

    rates: [process][optimizer step][parameter group], the learning rate that each real step used.
    state: rank 0's final weights and buffers. evaluation: [process], empty without one.
    """

    parts: list[list[Part]]
    start: list[str | None]
    rates: list[list[list[float]]]
    state: State
    evaluation: list[EvaluationRecord]

    @property
    def epochs(self) -> dict[int, int]:
        """Step -> its epoch."""
        return {part.step: part.epoch for part in self.parts[0]}

    @property
    def last_step(self) -> int:
        return max(part.step for part in self.parts[0])


def of_engine(record: Record, training: str) -> Trace:
    """The trace of a training in an engine's record."""
    ranks = record.training(training)
    return Trace(
        parts=[[_part(part, loss) for part, loss in zip(rank.parts, rank.losses)] for rank in ranks],
        start=[rank.start_digest for rank in ranks],
        rates=[rank.rates for rank in ranks],
        state=record.arrays(training),
        evaluation=[rank.evaluation for rank in ranks if rank.evaluation],
    )


@dataclass(frozen=True)
class Expectation:
    """What the reference played for one layout: `number` of its record's layouts."""

    record: Record
    number: int

    @property
    def facts(self) -> ReferenceLayoutRecord:
        """The layout, how it was played, and each training's observations."""
        return self.record.ranks[0].layouts[self.number]

    @property
    def rounded_to(self) -> str:
        """The dtype to which gradients are rounded."""
        return self.facts.rounds_to or self.facts.dtype

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number in that dtype."""
        return EPS[self.rounded_to]

    def of(self, training: str) -> ReferenceTrainingRecord:
        """The observations of one training, without added noise."""
        return self.facts.trainings[training][0]

    def trace(self, training: str, variant: int, processes: int) -> Trace:
        """The trace of one training. variant: 0 is the reference itself, 1 and 2 have noise in their rounding; of these
        the state is empty, and ReferenceTrainingRecord.distances has how far it is off.

        processes: a process that holds several replicas (DataParallel) is given their rows one after the other.
        """
        played = self.facts.trainings[training][variant]
        replicas = [[_part(part, part.loss or 0.0) for part in replica] for replica in played.seen]
        each = len(replicas) // processes
        return Trace(
            parts=[_merged(replicas[first : first + each]) for first in range(0, len(replicas), each)],
            start=[played.start_digest] * processes,
            rates=[played.rates] * processes,
            state={} if variant else self.arrays(training),
            evaluation=[played.evaluation] if played.evaluation else [],
        )

    def arrays(self, training: str, what: str = "") -> State:
        """The final state of a training; or '.buffersR', those of replica R that are not replica 0's; or of the first
        gradient, see sample_like, '.own': replica 0's, '.before_last' and '.own_before_last': without the last
        micro-batch, empty where there is but one."""
        return self.record.arrays(f"{self.facts.files}.{training}{what}")

    def start(self) -> State:
        """Samples of the weights and buffers that every training starts from, see sample_like; float32 where that holds
        them exactly."""
        return self.record.arrays(f"start.{self.facts.dtype}")

    def noise_distances(self, training: str) -> dict[str, float]:
        """Tensor -> how far rounding alone moves its final values; empty where no noise was played."""
        noisy = [played.distances for played in self.facts.trainings[training][1:]]
        return {name: max(distances[name] for distances in noisy) for name in (noisy[0] if noisy else ())}


def sample_like(values: Any, sample: Any) -> Any:
    """The elements of a tensor that a sample of it has, which is every n-th. shape [len(sample)]"""
    return values.reshape(-1)[:: math.ceil(values.size / len(sample)) if len(sample) else 1]


def _part(seen: MicroBatchRecord, mean_loss: float) -> Part:
    loss_sum = mean_loss * seen.weight
    return Part(seen.epoch, seen.step, seen.micro, seen.indices, seen.digests, seen.weight, loss_sum)


def _merged(replicas: list[list[Part]]) -> list[Part]:
    return [
        Part(
            epoch=parts[0].epoch,
            step=parts[0].step,
            micro=parts[0].micro,
            indices=[i for part in parts for i in part.indices],
            digests=[d for part in parts for d in part.digests],
            weight=sum(part.weight for part in parts),
            loss_sum=sum(part.loss_sum for part in parts),
        )
        for parts in zip(*replicas)
    ]
