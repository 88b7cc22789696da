"""The gradients of one step of a pipeline's stages, beside those of the chain: one process with all stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from samestep.bounds import (
    LEAST_WEIGHT_ADDED,
    TIMES_NEAR_OF_FACTOR,
    TIMES_NEAR_OF_WEIGHTS,
    TOLD_APART,
    WEIGHTS_OF_MEAN,
    ZERO_GRADIENT_OF_STAGE,
)
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, fit, multiple_of, norm
from samestep.judge.step_gradients import before_clipping
from samestep.message import Message, message
from samestep.records.pipeline_replay import PipelineReplayRecord
from samestep.records.record import Record
from samestep.records.script import LOCAL, STEP, TAKEN, of_kind

Gradients = Mapping[str, Array]


@dataclass(frozen=True)
class Apart:
    """The first difference in a stage's gradients: the rank, and the parameter."""

    rank: int
    name: str
    cause: Message


@dataclass
class PipelineGradients:
    """One step. columns: of each replica and micro-batch, the chain's gradients. before, taken: of each rank, before
    and after torch clips. share: of a column in the mean. close: how near is the same. per_call: the micro-batches of
    one call of the schedule."""

    chain: PipelineReplayRecord
    columns: Sequence[Gradients]
    before: Sequence[Gradients]
    taken: Sequence[Gradients]
    close: float
    per_call: int
    earlier: Sequence[Gradients] = field(default_factory=list)  # the gradients that the step before has taken

    @classmethod
    def read(
        cls, chain: PipelineReplayRecord, ranks: Ranks, record: Record, played: Record, step: int, close: float
    ) -> PipelineGradients:
        arrays, count = played.arrays(STEP.format(step)), chain.micro_batches * len(chain.replicas)
        columns = [of_kind(arrays, LOCAL.format(number, "")) for number in range(count)]
        of_ranks = [record.arrays(STEP.format(step), rank.rank) for rank in ranks]
        taken = [of_kind(of_rank, TAKEN) for of_rank in of_ranks]
        before = [before_clipping(of_rank) for of_rank in of_ranks]
        per_call = next((stage.micro_batches for rank in ranks for stage in rank.stages), chain.micro_batches)
        return cls(chain, columns, before, taken, close, per_call)

    @property
    def share(self) -> float:
        replica_share = 1 / len(self.chain.replicas)
        return replica_share / self.chain.micro_batches if self.chain.reduction == "mean" else replica_share

    def of_replica(self, replica: int) -> Sequence[Gradients]:
        count = self.chain.micro_batches
        return self.columns[replica * count : (replica + 1) * count]

    def replica_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.chain.replicas) if rank in ranks)

    def wanted(self, name: str, columns: Sequence[Gradients] | None = None) -> Array | None:
        """Returns what the whole model's gradient is, of all columns or some; of a tied weight that of all copies."""
        names = next((group for group in self.chain.ties if name in group), [name])
        parts = [column[n] for column in (self.columns if columns is None else columns) for n in names if n in column]
        return np.sum(parts, axis=0) * self.share if parts else None

    def rounding(self, name: str) -> float:
        """Returns how far apart two computations of a gradient may be."""
        parts = [norm(column[name]) for column in self.columns if name in column]
        return self.close * self.share * max(sum(parts), TOLD_APART * self.largest * len(self.columns))

    @property
    def largest(self) -> float:
        return max((norm(array) for column in self.columns for array in column.values()), default=0.0)

    def judged(self, rank: int, stage: int) -> list[str]:
        """Returns the parameters of a stage whose gradient is no rounding, of those that the rank holds."""
        named = [name for name in self.chain.stages[stage] if self.wanted(name) is not None]
        return [
            name
            for name in named
            if norm(self.columns[0].get(name, np.zeros(1))) > ZERO_GRADIENT_OF_STAGE * self.largest
        ]

    def factor(self, rank: int, names: Iterable[str], columns: Sequence[Gradients] | None = None) -> float | None:
        """Returns by which factor all of these gradients are those of the columns; None where there is none."""
        pairs = [(name, self.before[rank].get(name), self.wanted(name, columns)) for name in names]
        if not pairs or any(found is None or wanted is None for _, found, wanted in pairs):
            return None
        known = [(name, found, wanted) for name, found, wanted in pairs if found is not None and wanted is not None]
        square = sum(float(wanted @ wanted) for _, _, wanted in known)
        factor = sum(float(found @ wanted) for _, found, wanted in known) / square if square else 0.0
        near = all(
            norm(found - factor * wanted)
            <= TIMES_NEAR_OF_FACTOR * max(abs(factor), ZERO_GRADIENT_OF_STAGE) * self.rounding(name)
            for name, found, wanted in known
        )
        return factor if near and factor else None

    def stage_factor(self, rank: int, stage: int) -> tuple[float | None, Apart | None]:
        """Returns (the factor of a stage's gradients on a rank, what is apart)."""
        names = self.judged(rank, stage)
        factors = {name: self.factor(rank, [name]) for name in names}
        known = sorted(factor for factor in factors.values() if factor is not None)
        common = known[len(known) // 2] if known else None
        near = TIMES_NEAR_OF_FACTOR * max(TOLD_APART, self.close)
        wrong = [
            name
            for name, factor in factors.items()
            if factor is None or common is None or abs(factor / common - 1) > near
        ]
        if 2 * len(wrong) > len(names):
            common = None
        if not wrong:
            return common, None
        return common, Apart(rank, wrong[0], self._cause(rank, stage, wrong, names))

    def _cause(self, rank: int, stage: int, wrong: Sequence[str], names: Sequence[str]) -> Message:
        """Returns why some gradients of a stage are no multiple of the whole model's."""
        chain, replica_gradients = self.chain, self.of_replica(self.replica_of(rank))
        counts = {"wrong": len(wrong), "parameters": len(names), "stage": stage}
        tied = next((group for group in chain.ties if wrong[0] in group), None)
        if tied and set(wrong) <= set(tied) and self._is_one_copy(rank, wrong[0]):
            return message("tied_copies_not_summed", names=tied)
        if len(chain.replicas) > 1 and self.factor(rank, wrong, replica_gradients) is not None:
            return message("stage_not_reduced_over_replicas", replicas=len(chain.replicas), **counts)
        if self._holds_earlier(rank, wrong):
            return message("gradients_never_cleared")
        if self._divides_again(rank, wrong):
            calls = self.chain.micro_batches // self.per_call
            return message("earlier_calls_divided_again", calls=calls, micro_batches=self.per_call, **counts)
        if self._adds_stages(rank, wrong):
            return message("gradients_added_over_stages", **counts)
        if left := self._left_out(rank, wrong):
            return message("micro_batches_left_out", left=left, micro_batches=chain.micro_batches, **counts)
        found, wanted = self.before[rank].get(wrong[0]), self.wanted(wrong[0])
        off = norm(found - wanted) / norm(wanted) if found is not None and wanted is not None else 1.0
        return message("stage_gradient_unexplained", distance=off, parameter=wrong[0], **counts)

    def _is_one_copy(self, rank: int, name: str) -> bool:
        """Returns whether a tied weight's gradient is that of this copy alone."""
        parts = [column[name] for column in self.columns if name in column]
        found = self.before[rank].get(name)
        if found is None or not parts:
            return False
        summed = np.sum(parts, axis=0)
        return multiple_of(found, summed).left <= max(TOLD_APART, self.close) * norm(found)

    def _holds_earlier(self, rank: int, names: Sequence[str]) -> bool:
        if not self.earlier:
            return False
        for name in names:
            found, wanted, before = self.before[rank].get(name), self.wanted(name), self.earlier[rank].get(name)
            if found is None or wanted is None or before is None:
                return False
            # A schedule also divides the gradients that are there when it begins.
            left = min(norm(found - wanted - before / divisor) for divisor in (1, self.chain.micro_batches))
            if left > TIMES_NEAR_OF_WEIGHTS * self.close * norm(found):
                return False
        return True

    def _divides_again(self, rank: int, names: Sequence[str]) -> bool:
        """Returns whether each call of the schedule has divided what those before it had left by its micro-batches."""
        calls, left = divmod(self.chain.micro_batches, self.per_call)
        found = [self.before[rank].get(name) for name in names]
        if calls < 2 or left or self.per_call < 2 or any(array is None for array in found):
            return False
        target = np.concatenate([array for array in found if array is not None])
        replicas, weights = range(len(self.chain.replicas)), [float(self.per_call) ** n for n in range(calls)]
        expected = np.zeros_like(target)
        for number, weight in enumerate(weights):
            call_slice = slice(number * self.per_call, (number + 1) * self.per_call)
            columns = [column for replica in replicas for column in self.of_replica(replica)[call_slice]]
            parts = [self.wanted(name, columns) for name in names]
            if any(part is None for part in parts):
                return False
            expected += weight * np.concatenate([part for part in parts if part is not None])
        factor, left_over = multiple_of(target, expected)
        return bool(factor) and left_over <= max(TOLD_APART, TIMES_NEAR_OF_FACTOR * self.close) * norm(target)

    def _adds_stages(self, rank: int, names: Sequence[str]) -> bool:
        """Returns whether the gradients of other stages' parameters are added to those of the parameters with the same
        name in a stage."""
        for name in names:
            local = name.partition(": ")[2]
            other_names = [
                other_name
                for stage in self.chain.stages
                for other_name in stage
                if other_name.partition(": ")[2] == local
            ]
            parts = [self.wanted(other_name) for other_name in other_names if other_name != name]
            found, wanted = self.before[rank].get(name), self.wanted(name)
            same = [part for part in parts if part is not None and wanted is not None and part.shape == wanted.shape]
            if found is None or wanted is None or not same:
                return False
            fitted = fit(found, [wanted, *same], least=1)
            if fitted is None or fitted.left > TIMES_NEAR_OF_WEIGHTS * max(TOLD_APART, self.close) * norm(found):
                return False
            if min(abs(fitted.weights)) < LEAST_WEIGHT_ADDED:
                return False
        return True

    def _left_out(self, rank: int, names: Sequence[str]) -> list[int]:
        """Returns the micro-batches of which nothing is in some gradients; [] where that does not explain them."""
        found = [self.before[rank].get(name) for name in names]
        if any(array is None for array in found) or any(
            name not in column for column in self.columns for name in names
        ):
            return []
        target = np.concatenate([array for array in found if array is not None])
        columns = [np.concatenate([column[name] for name in names]) * self.share for column in self.columns]
        fitted = fit(target, columns, least=1)
        if fitted is None or fitted.left > TIMES_NEAR_OF_WEIGHTS * max(TOLD_APART, self.close) * norm(target):
            return []
        weights, count = fitted.weights, self.chain.micro_batches
        is_left = [(abs(weights[number::count]) < WEIGHTS_OF_MEAN * max(abs(weights))).all() for number in range(count)]
        return [number for number in range(count) if is_left[number]]
