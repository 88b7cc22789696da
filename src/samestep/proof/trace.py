"""Trace: one training as the judge reads it, the same whether an engine trained it or the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samestep.bounds import FLOOR_ULPS, TIMES_NOISE
from samestep.records.record import Record
from samestep.records.reference_record import ReferenceLayoutRecord, ReferenceTrainingRecord
from samestep.records.training_record import EvaluationRecord, MicroBatchRecord, TrainingRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from samestep.world.mesh import Mesh

    State = Mapping[str, NDArray[Any]]


EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class TracedMicroBatch:
    """What one process read of one micro-batch."""

    epoch: int
    """The number of the epoch, from 0."""

    step: int
    """The number of the optimizer step, from 0."""

    micro: int
    """The number of the micro-batch in its step, from 0."""

    indices: list[int]
    """The indices of the rows."""

    digests: list[str]
    """Digests of each row's tensors."""

    weight: float
    """The weight of the rows."""

    loss_sum: float
    """The unscaled mean loss times the weight of the rows."""

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class Trace:
    """One training, of an engine or of the reference, as the judge reads it."""

    micro_batches: list[list[TracedMicroBatch]]
    """What each process read: [process][micro-batch in order]."""

    start: list[list[str]]
    """Digests of each process's first weights and buffers: [process][tensor in the order of the state]."""

    rates: list[list[list[float]]]
    """The learning rate that each real step used: [process][optimizer step][parameter group]."""

    state: State
    """Rank 0's final weights and buffers."""

    evaluation: list[EvaluationRecord]
    """The final evaluation of each process. Empty: there is none."""

    mesh: Mesh | None = None
    """The mesh of the processes. None: they are not arranged in one."""

    divided: Mapping[str, Mapping[str, frozenset[int]]] = field(default_factory=dict)
    """Parameter -> axis of the mesh that divides it -> the places of the ranks that have a part of it, or all of it."""

    @property
    def epochs(self) -> dict[int, int]:
        """Step -> its epoch."""
        return {micro_batch.step: micro_batch.epoch for micro_batch in self.micro_batches[0]}

    @property
    def last_step(self) -> int:
        return max(micro_batch.step for micro_batch in self.micro_batches[0])

    @property
    def all_micro_batches(self) -> list[TracedMicroBatch]:
        """The micro-batches of all replicas: those of processes that share a replica stand once."""
        return [micro_batch for process in self.of_replicas for micro_batch in process]

    @property
    def of_replicas(self) -> list[list[TracedMicroBatch]]:
        """The micro-batches of each process that has a replica, or several; of processes that share a replica, those of
        the first."""
        if not self.mesh:
            return self.micro_batches
        first = {self.mesh.replica(rank): rank for rank in reversed(range(len(self.micro_batches)))}
        return [self.micro_batches[rank] for rank in sorted(first.values())]

    def rows_of_processes(self, step: int) -> list[list[int]]:
        """Returns the rows of a step that each replica's process has read."""
        return [
            [row for micro_batch in process if micro_batch.step == step for row in micro_batch.indices]
            for process in self.of_replicas
        ]

    def rows(self, step: int) -> list[int]:
        """Returns the rows of a step, those of one process after those of the other."""
        return [row for rows in self.rows_of_processes(step) for row in rows]


def replicas_of(rank: int, processes: int, replicas: int, mesh: Mesh | None = None) -> slice:
    """Returns which replicas a process holds: several of one process, or one that several processes share."""
    if mesh:
        return slice(mesh.replica(rank), mesh.replica(rank) + 1)
    size = replicas // processes
    return slice(rank * size, (rank + 1) * size)


def of_engine(record: Record, training: str) -> Trace:
    """Returns the trace of a training in an engine's record."""
    ranks = record.training(training)
    return Trace(
        micro_batches=[list(map(_traced, rank.micro_batches, rank.losses)) for rank in ranks],
        start=[rank.start_digests for rank in ranks],
        rates=[rank.rates for rank in ranks],
        state=record.arrays(training),
        evaluation=[rank.evaluation for rank in ranks if rank.evaluation],
        mesh=record.ranks[0].world.mesh,
        divided=_divided(ranks),
    )


def _divided(ranks: Sequence[TrainingRecord]) -> dict[str, dict[str, frozenset[int]]]:
    divided: dict[str, dict[str, frozenset[int]]] = {}
    for rank in ranks:
        for name, places in rank.divided.items():
            axes = divided.setdefault(name, {})
            axes |= {axis: axes.get(axis, frozenset()) | {place} for axis, place in places.items()}
    return divided


@dataclass(frozen=True)
class Expectation:
    """What the reference played for one layout: `number` of its record's layouts."""

    record: Record
    number: int

    @property
    def facts(self) -> ReferenceLayoutRecord:
        """The layout, how it was played, and the record of each training."""
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
        """Returns the record of one training, without added noise."""
        return self.facts.trainings[training][0]

    def trace(self, training: str, variant: int, processes: int, mesh: Mesh | None = None) -> Trace:
        """Returns the trace of one training. variant: 0 is the reference itself; 1 and 2 have noise in their rounding,
        their state is empty, and the record's `distances` has how far it is off.

        processes: a process that holds several replicas (DataParallel) is given their rows one after the other; the
        processes that share a replica, as the mesh says, each get its rows.
        """
        played = self.facts.trainings[training][variant]
        replicas = [[_traced(micro_batch, micro_batch.loss or 0.0) for micro_batch in r] for r in played.micro_batches]
        held = [replicas[replicas_of(rank, processes, len(replicas), mesh)] for rank in range(processes)]
        return Trace(
            micro_batches=[_merged(replicas_held) for replicas_held in held],
            start=[played.start_digests] * processes,
            rates=[played.rates] * processes,
            state={} if variant else self.arrays(training),
            evaluation=[played.evaluation] if played.evaluation else [],
            mesh=mesh,
        )

    def arrays(self, training: str, what: str = "") -> State:
        """Returns the final state of a training, or tensors of it.

        what: '.buffers0': those buffers of replica 0 that are not persistent; '.buffersR': those buffers of replica R
        that are not replica 0's. Of the first gradient, as samples: '.own': replica 0's; '.before_last',
        '.own_before_last': without the last micro-batch, empty where there is but one. See sample_like.
        """
        return self.record.arrays(f"{self.facts.files}.{training}{what}")

    def start(self) -> State:
        """Returns samples of the weights and buffers that every training starts from, see sample_like; float32 where
        that holds them exactly."""
        return self.record.arrays(f"start.{self.facts.dtype}")

    def noise_distances(self, training: str) -> dict[str, float]:
        """Returns tensor -> how far rounding alone moves its final values; empty where no noise was played."""
        noisy, factor = self._draws(training), self.disagreement(training)
        return {name: factor * max(draw[name] for draw in noisy) for name in (noisy[0] if noisy else ())}

    def disagreement(self, training: str) -> float:
        """Returns by which factor the draws of noise disagree on a training's final values; see disagreement()."""
        furthest = [max(draw.values(), default=0.0) for draw in self._draws(training)]
        return disagreement(furthest, FLOOR_ULPS * self.eps)

    def _draws(self, training: str) -> list[Mapping[str, float]]:
        """Returns tensor -> how far each draw of noise moves its final values."""
        return [played.distances for played in self.facts.trainings[training][1:]]


def disagreement(draws: Sequence[float], least: float) -> float:
    """Returns by which factor draws of noise disagree on how far rounding moves a value: 1 where TIMES_NOISE covers it.

    Where each step multiplies what rounding has moved, as the inner iterations of LBFGS do, one draw can be many times
    as far off as another one, and a third as far beyond both. Limited, since a value that jumps, as where a maximum
    changes hands, jumps no further the next time. least: below it a distance is that of a single rounding.
    """
    furthest, nearest = max(draws, default=0.0), max(min(draws, default=0.0), least)
    if not furthest > TIMES_NOISE * nearest:
        return 1.0
    return min(furthest / nearest, TIMES_NOISE**2) if nearest else TIMES_NOISE**2


def sample_like(values: Any, sample: Any) -> Any:
    """Returns the elements of a tensor that a sample of it has, which is every n-th. shape [len(sample)]"""
    return values.reshape(-1)[:: math.ceil(values.size / len(sample)) if len(sample) else 1]


def _traced(micro_batch: MicroBatchRecord, mean_loss: float) -> TracedMicroBatch:
    return TracedMicroBatch(
        micro_batch.epoch,
        micro_batch.step,
        micro_batch.micro,
        indices=micro_batch.indices,
        digests=micro_batch.digests,
        weight=micro_batch.weight,
        loss_sum=mean_loss * micro_batch.weight,
    )


def _merged(replicas: list[list[TracedMicroBatch]]) -> list[TracedMicroBatch]:
    """Returns the micro-batches of a process that holds several replicas."""
    return [
        TracedMicroBatch(
            epoch=parts[0].epoch,
            step=parts[0].step,
            micro=parts[0].micro,
            indices=[row for part in parts for row in part.indices],
            digests=[digest for part in parts for digest in part.digests],
            weight=sum(part.weight for part in parts),
            loss_sum=sum(part.loss_sum for part in parts),
        )
        for parts in zip(*replicas)
    ]
