"""Trace: one training as the judge reads it, the same whether an engine or the reference was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samestep.records.record import Record

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
    """parts: [process][micro-batch in order]. start: per process, a digest of its first weights.

    rates: [process][optimizer step][parameter group], the learning rate that each real step used.
    state: rank 0's final weights and buffers. evaluation: [process] of {rows, sums, indices}; empty without one.
    """

    parts: list[list[Part]]
    start: list[str]
    rates: list[list[list[float]]]
    state: State
    evaluation: list[dict[str, Any]]


def of_engine(record: Record, training: str) -> Trace:
    """The trace of an engine's launch."""
    ranks = record.training(training)
    return Trace(
        parts=[[_part(note, loss) for note, loss in zip(rank["parts"], rank["losses"])] for rank in ranks],
        start=[rank["start_digest"] for rank in ranks],
        rates=[rank["rates"] for rank in ranks],
        state=record.arrays(training),
        evaluation=[rank["evaluation"] for rank in ranks if rank["evaluation"]],
    )


@dataclass(frozen=True)
class Expectation:
    """What the reference says about one layout: `number` of its record's layouts."""

    record: Record
    number: int

    @property
    def facts(self) -> dict[str, Any]:
        """layout, dtype, rounds_to, exact_steps, float64_failed, and each training's observations."""
        facts: dict[str, Any] = self.record.ranks[0]["layouts"][str(self.number)]
        return facts

    def of(self, training: str) -> dict[str, Any]:
        """The unshaken observations of one training: norms, draws, parameters, length, …"""
        observed: dict[str, Any] = self.facts[f"{training}.0"]
        return observed

    def trace(self, training: str, variant: int, processes: int) -> Trace:
        """variant 0 is the reference itself, 1 and 2 have their rounding shaken.

        A process that holds several replicas (DataParallel) is told their rows one after the other.
        """
        played = self.facts[f"{training}.{variant}"]
        replicas = [[_part(note, note["loss"]) for note in replica] for replica in played["seen"]]
        each = len(replicas) // processes
        evaluation = played["evaluation"]
        return Trace(
            parts=[_merged(replicas[first : first + each]) for first in range(0, len(replicas), each)],
            start=[self.of(training)["start_digest"]] * processes,
            rates=[played["rates"]] * processes,
            state=self.arrays(training, variant),
            evaluation=[evaluation] if evaluation else [],
        )

    def arrays(self, training: str, variant: int = 0, what: str = "") -> State:
        """The final state of a training; or its '.start', '.buffersR', or of its first gradient '.rank0_gradient',
        '.before_last' and '.rank0_before_last': without the last micro-batch, empty where there is but one."""
        return self.record.arrays(f"{self.number}.{training}.{variant}{what}")


def _part(note: Mapping[str, Any], loss: float) -> Part:
    return Part(
        epoch=note["epoch"],
        step=note["step"],
        micro=note["micro"],
        indices=note["indices"],
        digests=note["digests"],
        weight=note["weight"],
        loss_sum=loss * note["weight"],
    )


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
