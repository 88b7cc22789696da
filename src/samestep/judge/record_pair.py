"""Two recordings of a script, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from samestep.judge.findings import Ranks, common_steps
from samestep.judge.fit import Array
from samestep.judge.gradient_comparison import GradientComparison
from samestep.judge.matching import Names, matched, renamed, with_names
from samestep.judge.step_gradients import arrays_of_ranks, norm_of_all, whole_gradients
from samestep.records.record import Record
from samestep.records.script import AFTER, AVERAGE, BEFORE, STATISTICS, TAKEN, UNCLIPPED, StepRecord


@dataclass(frozen=True)
class RecordPair:
    """Two recordings of a script, and their folders."""

    first: Ranks
    """The ranks of the first recording."""

    second: Ranks
    """The ranks of the second recording, with the first recording's names of parameters."""

    first_record: Record
    """The folder of the first recording."""

    second_record: Record
    """The folder of the second recording."""

    since: int = 0
    """The step of the first recording with which the second begins."""

    names: Names = field(default_factory=dict)
    """The second recording's names of parameters -> the first recording's. Empty: the names are the same."""

    @property
    def steps(self) -> int:
        """How many steps can be compared: those that every rank of both has taken."""
        return max(0, min(len(common_steps(self.first)) - self.since, len(common_steps(self.second))))

    @property
    def ends_together(self) -> bool:
        """Whether no rank has taken a step that is not compared."""
        ahead = (len(rank.steps) - self.since > self.steps for rank in self.first)
        return not any(ahead) and all(len(rank.steps) == self.steps for rank in self.second)

    @property
    def resumed_since(self) -> int | None:
        """The step with which a resumed run begins; None where the second is not one."""
        return self.since or None

    @property
    def on_other_ranks(self) -> bool:
        """Whether the two were recorded on other numbers of ranks."""
        return len(self.first) != len(self.second)

    def draws_by_rank(self, number: int) -> bool:
        """Returns whether a forward up to this step draws random numbers, of which other numbers of ranks draw
        others."""
        ranks = (*self.first, *self.second)
        return self.on_other_ranks and any(any(rank.randoms.draws[: number + 1]) for rank in ranks)

    @property
    def normalises_by_rank(self) -> bool:
        """Whether BatchNorm may see other rows at once, as the ranks have other ones."""
        names = (*self.first[0].buffers, *self.second[0].buffers)
        return self.on_other_ranks and any(name.rpartition(".")[2] in STATISTICS for name in names)

    @property
    def sharded(self) -> set[str]:
        """The names of the parameters of which each rank has recorded its part, on one side or on both."""
        return {name for ranks in (self.first, self.second) for rank in ranks for name in rank.steps[0].shards}

    def with_matched_names(self) -> RecordPair:
        """Returns the pair with the first recording's names for the second's parameters, where these are others."""
        start = self.first[0].start, self.second[0].start
        if self.since or not self.steps or not all(start):
            return self
        names = matched(*start, *self.taken(0))
        if all(name == first_name for name, first_name in names.items()):
            return self
        return replace(self, second=renamed(self.second, names), names={**self.names, **names})

    @property
    def holds_parts(self) -> bool:
        """Whether ranks hold other parts of the model, so that one of them does not stand for all."""
        return any(rank.pieces or rank.start != ranks[0].start for ranks in (self.first, self.second) for rank in ranks)

    def of_rank(self, number: int) -> RecordPair:
        """Returns what one rank has recorded beside the same rank of the other recording."""
        return replace(self, first=self.first[number : number + 1], second=self.second[number : number + 1])

    def steps_of_rank_0(self, number: int) -> tuple[StepRecord, StepRecord]:
        """Returns the second's step `number` after the first's step beside it."""
        return self.first[0].steps[self.since + number], self.second[0].steps[number]

    def taken(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the gradients that the optimizers took in these steps."""
        return self._arrays(TAKEN, number)

    def unclipped(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the gradients of these steps as they were before anything was clipped."""
        taken, before = self.taken(number), self.clipped(number)
        return {**taken[0], **before[0]}, {**taken[1], **before[1]}

    def clipped(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the gradients of these steps that a function of torch's then clipped, as they were before that."""
        return self._arrays(UNCLIPPED, number)

    def weights(self, number: int, before: bool = False) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the sums of the weights after these steps; none where they were not recorded. before: before the
        first."""
        return self._arrays(BEFORE if before else AFTER, number)

    def averages(self, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the sums of what no optimizer moves, under its own names on each side, where it has changed."""
        of_ranks = ((self.first, self.first_record, self.since + number), (self.second, self.second_record, number))
        first, second = (_whole(ranks, record, AVERAGE, step, ()) for ranks, record, step in of_ranks)
        return first, second

    def _arrays(self, kind: str, number: int) -> tuple[dict[str, Array], dict[str, Array]]:
        first, second = self.steps_of_rank_0(number)
        wanted = _whole(self.first, self.first_record, kind, self.since + number, first.shards)
        # The names as the second recording's file has them.
        shards = [self.named_in_second(name) for name in second.shards]
        return wanted, with_names(_whole(self.second, self.second_record, kind, number, shards), self.names)

    @cached_property
    def distances(self) -> list[float | None]:
        """How far the gradients of each step are apart, relative to the first's; None where they cannot be compared, as
        the steps have those of other parameters, or one is not finite."""
        return [self._distance(number) for number in range(self.steps)]

    @cached_property
    def same_bits(self) -> int:
        """How many steps are the same to the last bit: the gradients, and the weights after them."""
        if self.since or self.first[0].start != self.second[0].start:
            return 0
        for number in range(self.steps):
            first, second = self.steps_of_rank_0(number)
            if self.distances[number] != 0 or first.weights != second.weights:
                return number
        return self.steps

    def begins_alike(self, number: int) -> bool:
        """Returns whether a step begins with the same bits of weights in both."""
        return number <= self.same_bits and self.first[0].start == self.second[0].start and not self.since

    def compared(
        self, number: int, bound: float = math.inf, *, before_clipping: bool = False
    ) -> GradientComparison | None:
        """Returns what the optimizers took in these steps, compared relative to all of it; None where the steps have
        gradients of other parameters. before_clipping: as it was before anything was clipped."""
        first, second = self.unclipped(number) if before_clipping else self.taken(number)
        names = shared_arrays(first, second)
        if not names or len(names) < max(len(first), len(second)):
            return None
        sizes = dict.fromkeys([(0, name) for name in names], norm_of_all(first, names) or 1.0)
        return GradientComparison({0: second}, {0: {name: first[name] for name in names}}, bound, sizes)

    def _distance(self, number: int) -> float | None:
        compared = self.compared(number)
        return None if compared is None or compared.not_finite(number) else compared.worst

    def named_in_second(self, name: str) -> str:
        """Returns the second's own name of one of the first's parameters."""
        return next((second_name for second_name, known in self.names.items() if known == name), name)


def shared_arrays(first: Mapping[str, Array], second: Mapping[str, Array]) -> list[str]:
    """Returns the names of the arrays that both have, of the same shape."""
    return [name for name in first if name in second and first[name].shape == second[name].shape]


def _whole(ranks: Ranks, record: Record, kind: str, step: int, shards: Sequence[str]) -> dict[str, Array]:
    return whole_gradients(arrays_of_ranks(record, ranks if shards else ranks[:1], step), kind, shards)[0]
