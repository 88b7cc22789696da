"""Judges an interrupted training: joins the records of its two launches into one, and compares the state between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samestep.message import as_said
from samestep.proof.judge import judge
from samestep.proof.plan import AS_NUMERICS
from samestep.proof.resume_causes import resume_cause, state_cause
from samestep.proof.trace import EPS, Expectation, of_engine
from samestep.records.plan import TRAININGS
from samestep.records.record import RankRecord, Record, TensorRecord, TrainingRecord
from samestep.records.results import Divergence, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOSE = 4096  # units in the last place by which sums over other pieces may differ
OF_RANK = ("buffer ", "carried state ")  # what each rank has for itself

State = Mapping[str, TensorRecord]


@dataclass(frozen=True)
class JoinedRecord(Record):
    """The record of a training that one launch began, and another one continued.

    folder: of the launch that continued it. first: the record of the one that began.
    """

    first: Record

    @cached_property
    def rest(self) -> Record:
        """The record of the second launch alone."""
        return Record(self.folder)

    @cached_property
    def ranks(self) -> list[RankRecord]:
        first, rest = self.first.ranks, self.rest.ranks
        return [self._rank(number, first, rest) for number in range(max(len(first), len(rest)))]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Returns the tensors at the training's end, or of one that was not interrupted."""
        record = self.rest if self._is_interrupted(name) else self.first
        return record.arrays(name, rank)

    def training_names(self) -> list[str]:
        """Returns the names of the trainings that were interrupted."""
        return list(self.rest.ranks[0].trainings)

    def interruption(self, name: str) -> int:
        """Returns how many steps the first launch has taken of a training."""
        return len(self.first.ranks[0].trainings[name].rates)

    def _is_interrupted(self, name: str) -> bool:
        return name in self.training_names()

    def _rank(self, number: int, first: list[RankRecord], rest: list[RankRecord]) -> RankRecord:
        here = first[number] if number < len(first) else rest[number]
        trainings = {}
        for name in first[0].trainings:
            parts = _seen(first, name, number), _seen(rest, name, number)
            trainings[name] = _joined(*parts) if self._is_interrupted(name) else parts[0]
        return replace(here, trainings=trainings)


def _seen(ranks: list[RankRecord], name: str, number: int) -> TrainingRecord:
    """What a rank observed. One that was not there saw no rows, and of what is alike on all ranks what rank 0 saw."""
    if number < len(ranks) and name in ranks[number].trainings:
        return ranks[number].trainings[name]
    alike = ranks[0].trainings.get(name, TrainingRecord())
    return TrainingRecord(
        start_digest=alike.start_digest,
        rates=alike.rates,
        later={epoch: [] for epoch in alike.later},
        end_digests=alike.end_digests,
    )


def _joined(first: TrainingRecord, rest: TrainingRecord) -> TrainingRecord:
    """One rank's observations of both parts."""
    return replace(
        rest,
        losses=first.losses + rest.losses,
        step_of=first.step_of + rest.step_of,
        weight_of=first.weight_of + rest.weight_of,
        start_digest=first.start_digest,
        autocast=first.autocast or rest.autocast,
        parts=first.parts + rest.parts,
        rates=first.rates + rest.rates,
        skipped_steps=max(first.skipped_steps, rest.skipped_steps),
    )


def judge_resumed(loop: Expectation, record: JoinedRecord, numerics: Expectation | None = None) -> Verdict:
    """Compares an interrupted training with the reference, which was not interrupted, as judge() does.

    A state that was lost between the launches is named first, where the steps before the interruption are right.
    """
    verdict = judge(loop, record, numerics)
    divergence = verdict.first_divergence
    for name in record.training_names():
        training, cut = name.removeprefix(AS_NUMERICS.format("")), record.interruption(name)
        is_exact = training == name
        moved = next(_moved(record, name), None)
        if divergence and is_exact and _before(divergence, training, 0 if moved else cut):
            break
        lost = moved or next(_lost(loop if is_exact or numerics is None else numerics, record, name), None)
        if lost:
            return replace(verdict, verdict="differs", bitwise=False, first_divergence=lost)
        if divergence and is_exact and divergence.training == training:
            expected, observed = loop.trace(training, 0, len(record.ranks)), of_engine(record, training)
            cause = resume_cause(divergence, cut, expected, observed, loop.of(training).draws)
            return replace(
                verdict, first_divergence=replace(divergence, cause=as_said(cause) if cause else divergence.cause)
            )
    return verdict


def _before(divergence: Divergence, training: str, cut: int) -> bool:
    """Whether a difference comes before the interruption of a training."""
    if divergence.training != training:
        return TRAININGS.index(divergence.training) < TRAININGS.index(training)
    return divergence.step is not None and divergence.step < cut


def _states(record: JoinedRecord, training: str) -> tuple[list[State], list[State]]:
    """Each rank's state at the interruption, and after loading."""
    first, rest = ([seen.state for seen in each.training(training)] for each in (record.first, record.rest))
    return first, rest


def _moved(record: JoinedRecord, training: str) -> Iterator[Divergence]:
    """The ranks that continued at another step than that of the interruption."""
    cut = record.interruption(training)
    for rank, seen in enumerate(record.rest.training(training)):
        if seen.resumed_from != cut:
            others = any(_differing(*_states(record, training), EPS["float32"]))
            cause = state_cause("position", cut, seen.resumed_from, others)
            yield Divergence(training, cut, "resumed step", None, rank, cut, seen.resumed_from, as_said(cause))


def _lost(loop: Expectation, record: JoinedRecord, training: str) -> Iterator[Divergence]:
    """The differences between the state at the interruption and the one that the second launch began with."""
    cut, slack = record.interruption(training), CLOSE * loop.eps
    before, after = _states(record, training)
    for name, rank, want, got in _differing(before, after, slack):
        cause = state_cause(name, want, got, len(before) != len(after))
        yield Divergence(training, cut, "resumed state", name, rank, want, got, as_said(cause))


def _differing(
    before: list[State], after: list[State], slack: float
) -> Iterator[tuple[str, int, float | str, float | str]]:
    """Yields (name, rank, sum at the interruption, sum after loading or 'lost') of what is not the same."""
    for name in dict.fromkeys(name for state in before for name in state):
        if not _may_be_there(name, after):
            continue
        for rank, want, got in _pairs(name, before, after):
            if got is None:
                yield name, rank, want.magnitude, "lost"
            elif want.whole == got.whole:  # else an engine keeps this parameter elsewhere, as DeepSpeed's stage 3
                close = slack * max(want.magnitude, got.magnitude)
                if abs(want.mixed - got.mixed) > close or abs(want.magnitude - got.magnitude) > close:
                    yield name, rank, want.magnitude, got.magnitude
    for name, seen in after[0].items():
        if name.startswith(("weights of ", "evaluations ")) and name not in before[0]:
            yield name, 0, "absent", seen.magnitude


def _may_be_there(name: str, after: list[State]) -> bool:
    """Whether the second launch shows such a part: another engine may have no scaler, or hide the optimizer's state."""
    kind, _, of = name.partition(" of ")
    if of and kind not in ("weights", "average"):
        return any(f"optimizer of {of}" in state for state in after)
    return bool(of) or any(each.startswith(name.partition("[")[0]) for state in after for each in state)


def _pairs(
    name: str, before: list[State], after: list[State]
) -> Iterator[tuple[int, TensorRecord, TensorRecord | None]]:
    """Yields (rank, what it should have, what it has) of one tensor; None: nothing."""
    if name.startswith(OF_RANK):
        if name.startswith("carried") and len(before) != len(after):
            return  # of other rows
        for rank, state in enumerate(after):
            want = before[rank if len(before) == len(after) else 0].get(name)
            if want is not None:
                yield rank, want, state.get(name)
        return
    want = _whole(name, before)[0][1]
    copies = _whole(name, after)
    yield from ((rank, want, got) for rank, got in copies) if copies else [(0, want, None)]


def _whole(name: str, states: list[State]) -> list[tuple[int, TensorRecord]]:
    """(rank, sums) of each whole copy of a tensor; where ranks have pieces, these together as rank 0's."""
    here = [(rank, state[name]) for rank, state in enumerate(states) if name in state]
    copies = [(rank, seen) for rank, seen in here if seen.size == seen.whole]
    if copies or not here:
        return copies
    pieces = [seen for _, seen in here]
    total = TensorRecord(
        sum(seen.size for seen in pieces),
        pieces[0].whole,
        sum(seen.magnitude for seen in pieces),
        sum(seen.mixed for seen in pieces),
    )
    return [(here[0][0], total)]
