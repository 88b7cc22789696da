"""Judges an interrupted training: joins the records of its two launches into one, compares the state between them, and
names the usual cause of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.bounds import RESUMED_APART_ULPS
from samestep.message import Message, message
from samestep.proof.judge import judge
from samestep.proof.plan import AS_NUMERICS
from samestep.proof.resumed_step import why_other_rates, why_other_rows
from samestep.proof.trace import EPS, Expectation, Trace, of_engine
from samestep.records.plan import TRAININGS
from samestep.records.record import RankRecord, Record
from samestep.records.results import Divergence, Verdict
from samestep.records.training_record import TensorRecord, TrainingRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

OF_RANK = ("buffer ", "carried state ")  # the state that each rank has for itself

State = Mapping[str, TensorRecord]


@dataclass(frozen=True)
class JoinedRecord(Record):
    """The record of a training that one launch began and another launch continued.

    folder: of the launch that continued it. first: the record of the one that began.
    """

    first: Record

    @cached_property
    def rest(self) -> Record:
        """The record of the second launch alone."""
        return Record(self.folder)

    @cached_property
    def ranks(self) -> list[RankRecord]:
        began, continued = self.first.ranks, self.rest.ranks
        return [self._rank(number, began, continued) for number in range(max(len(began), len(continued)))]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Returns the tensors at the training's end, or of one that was not interrupted."""
        return Record(self.folder_of(name)).arrays(name, rank)

    def folder_of(self, name: str) -> Path:
        """Returns the folder of the launch that ended a training."""
        return self.folder if self._is_interrupted(name) else self.first.folder

    def training_names(self) -> list[str]:
        """Returns the names of the trainings that were interrupted."""
        return list(self.rest.ranks[0].trainings)

    def interruption(self, name: str) -> int:
        """Returns how many steps the first launch has taken of a training."""
        return len(self.first.ranks[0].trainings[name].rates)

    def _is_interrupted(self, name: str) -> bool:
        return name in self.training_names()

    def _rank(self, number: int, first: list[RankRecord], later: list[RankRecord]) -> RankRecord:
        trainings = {}
        for name in first[0].trainings:
            began, continued = _training(first, name, number), _training(later, name, number)
            trainings[name] = _joined(began, continued) if self._is_interrupted(name) else began
        return replace(first[number] if number < len(first) else later[number], trainings=trainings)


def _training(ranks: list[RankRecord], name: str, number: int) -> TrainingRecord:
    """Returns what a rank observed. A rank that was not in the launch read no rows; values that are the same on all
    ranks are those of rank 0."""
    if number < len(ranks) and name in ranks[number].trainings:
        return ranks[number].trainings[name]
    alike = ranks[0].trainings.get(name, TrainingRecord())
    return TrainingRecord(
        start_digests=alike.start_digests,
        rates=alike.rates,
        later={epoch: [] for epoch in alike.later},
        end_digests=alike.end_digests,
        curve=alike.curve,
        best_at=alike.best_at,
        restart=alike.restart,
        autocast=alike.autocast,
    )


def _joined(began: TrainingRecord, continued: TrainingRecord) -> TrainingRecord:
    """Returns one rank's observations of both parts."""
    return replace(
        continued,
        losses=began.losses + continued.losses,
        step_of=began.step_of + continued.step_of,
        weight_of=began.weight_of + continued.weight_of,
        start_digests=began.start_digests,
        autocast=began.autocast or continued.autocast,
        micro_batches=began.micro_batches + continued.micro_batches,
        rates=began.rates + continued.rates,
        skipped_steps=max(began.skipped_steps, continued.skipped_steps),
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
            observed = of_engine(record, training)
            expected = loop.trace(training, 0, len(record.ranks), observed.mesh)
            cause = resume_cause(divergence, cut, expected, observed, loop.of(training).draws)
            return replace(verdict, first_divergence=replace(divergence, cause=cause or divergence.cause))
    return verdict


def _before(divergence: Divergence, training: str, cut: int) -> bool:
    """Returns whether a difference comes before the interruption of a training."""
    if divergence.training != training:
        return TRAININGS.index(divergence.training) < TRAININGS.index(training)
    return divergence.step is not None and divergence.step < cut


def _states(record: JoinedRecord, training: str) -> tuple[list[State], list[State]]:
    """Returns each rank's state at the interruption, and after loading."""
    began, continued = ([rank.state for rank in part.training(training)] for part in (record.first, record.rest))
    return began, continued


def _moved(record: JoinedRecord, training: str) -> Iterator[Divergence]:
    """Yields the divergences of ranks that continued at another step than that of the interruption."""
    cut = record.interruption(training)
    for rank, continued in enumerate(record.rest.training(training)):
        found = continued.resumed_from
        if found != cut:
            changed = any(_differing(*_states(record, training), EPS["float32"]))
            cause = state_cause("position", cut, found, changed)
            yield Divergence(
                training, cut, "resumed step", tensor=None, rank=rank, expected=cut, found=found, cause=cause
            )


def _lost(loop: Expectation, record: JoinedRecord, training: str) -> Iterator[Divergence]:
    """Yields what differs between the state at the interruption and the one that the second launch began with."""
    cut, slack = record.interruption(training), RESUMED_APART_ULPS * loop.eps
    before, after = _states(record, training)
    for name, rank, want, got in _differing(before, after, slack):
        cause = state_cause(name, want, got, len(before) != len(after))
        yield Divergence(training, cut, "resumed state", tensor=name, rank=rank, expected=want, found=got, cause=cause)


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
    for name, tensor in after[0].items():
        if name.startswith(("weights of ", "evaluations ")) and not any(name in state for state in before):
            yield name, 0, "absent", tensor.magnitude


def _may_be_there(name: str, after: list[State]) -> bool:
    """Returns whether the second launch shows such a part of the state: another engine may have no scaler, or hide the
    optimizer's state."""
    kind, _, tensor = name.partition(" of ")
    if tensor and kind not in ("weights", "average"):
        return any(f"optimizer of {tensor}" in state for state in after)
    return bool(tensor) or any(part.startswith(name.partition("[")[0]) for state in after for part in state)


def _pairs(
    name: str, before: list[State], after: list[State]
) -> Iterator[tuple[int, TensorRecord, TensorRecord | None]]:
    """Yields (rank, its expected values, its values) of one tensor; None: the rank has no values."""
    if name.startswith(OF_RANK):
        if name.startswith("carried") and len(before) != len(after):
            return  # the rows differ
        for rank, state in enumerate(after):
            of_rank = before[rank if len(before) == len(after) else 0]
            want = of_rank.get(name) or next((state[name] for state in before if name in state), None)
            # Whether it is in another stage of a pipeline.
            elsewhere = name not in state and any(name in stage_state for stage_state in after)
            if want is not None and not elsewhere:
                yield rank, want, state.get(name)
        return
    want = _whole(name, before)[0][1]
    copies = _whole(name, after)
    yield from ((rank, want, got) for rank, got in copies) if copies else [(0, want, None)]


def _whole(name: str, states: list[State]) -> list[tuple[int, TensorRecord]]:
    """Returns (rank, sums) of each whole copy of a tensor; where ranks have pieces, the pieces count together as rank
    0's."""
    held = [(rank, state[name]) for rank, state in enumerate(states) if name in state]
    copies = [(rank, tensor) for rank, tensor in held if tensor.size == tensor.whole]
    if copies or not held:
        return copies
    pieces = [piece for _, piece in held]
    total = TensorRecord(
        sum(piece.size for piece in pieces),
        pieces[0].whole,
        magnitude=sum(piece.magnitude for piece in pieces),
        mixed=sum(piece.mixed for piece in pieces),
    )
    return [(held[0][0], total)]


def state_cause(name: str, expected: Any, found: Any, changed: bool) -> Message:
    """Returns why the second launch began with another value of a part of the state.

    name: 'position', or a part as in rank/observer. expected, found: the steps of a position; sums of a tensor, or
    'lost'. changed: of a position, whether the rest of the state is another's too; of a tensor, whether there are other
    ranks.
    """
    if name == "position":
        if found == 0:
            return message("training_began_anew")
        if changed:
            return message("older_checkpoint_loaded", step=found)
        return message("position_restored_wrongly", steps=abs(found - expected))
    kind, _, tensor = name.partition(" of ")
    part = name.partition(" [")[0].partition("[")[0].strip()
    how = message("was_not_restored")
    if found != "lost":
        how = message("began_anew" if found == 0.0 else "is_not_what_was_saved")
    where = message("on_the_new_ranks") if changed else None
    if expected == "absent":
        if part == "evaluations":
            return message("evaluation_counted_twice")
        return message("tied_weight_loaded_apart", tensor=tensor)
    if kind == "weights":
        return message("weights_not_those_of_checkpoint", tensor=tensor, where=where)
    if kind == "average":
        return message("average_of_weights_lost", tensor=tensor, how=how, where=where)
    if name.startswith("buffer "):
        return message("buffer_not_the_ranks_own", buffer=name.removeprefix("buffer "), where=where)
    if name.startswith("carried state"):
        return message("carried_state_lost")
    if tensor and kind == "step":
        return message("step_count_of_optimizer_lost", tensor=tensor, how=how)
    if tensor:
        return message("optimizer_state_lost", state=kind, tensor=tensor, how=how, where=where)
    if part == "evaluations":
        return message("evaluations_not_restored")
    if part == "scaler":
        return message("loss_scaler_not_restored")
    counted = None if found in ("lost", 0.0) else message("not_restored_or_step_counted_twice")
    return message("state_of_component_lost", component=part.replace("_", " "), how=how, counted=counted)


def resume_cause(divergence: Divergence, cut: int, expected: Trace, observed: Trace, draws: bool) -> Message | None:
    """Returns the cause of a difference after the interruption, where the state was restored; None: none is known.

    cut: the steps before the interruption. draws: whether the model draws random numbers.
    """
    step = cut if divergence.step is None else divergence.step
    if divergence.quantity in ("rows", "indices"):
        read, epochs = observed.rows(step), expected.epochs
        if not read:
            return message("step_without_rows", step=step)
        same = [number for number in epochs if number != step and expected.rows(number) == read]
        return why_other_rows(step, same, epochs)
    if divergence.quantity == "tensors received":
        return _tensors_cause(step, expected, observed)
    if divergence.quantity == "learning rate":
        found = divergence.found if isinstance(divergence.found, list) else [divergence.found]
        return why_other_rates(step, found, expected.rates[0])
    if divergence.quantity == "loss" and step == cut:
        return message("loss_with_other_random_numbers_after_loading" if draws else "loss_wrong_after_loading")
    if divergence.quantity in ("loss", "parameter") and step >= cut:
        return message("update_wrong_after_interruption", step=cut)
    if divergence.quantity in ("optimizer steps", "every index once"):
        return message("interrupted_epoch_ended_otherwise")
    return None


def _tensors_cause(step: int, expected: Trace, observed: Trace) -> Message:
    """Looks for the epoch whose augmentation was drawn instead."""
    epoch = expected.epochs[step]
    digests: dict[int, set[tuple[int, str]]] = {}
    for micro_batch in expected.all_micro_batches:
        digests.setdefault(micro_batch.epoch, set()).update(zip(micro_batch.indices, micro_batch.digests))
    read = {
        row
        for micro_batch in observed.all_micro_batches
        if micro_batch.step == step
        for row in zip(micro_batch.indices, micro_batch.digests)
    }
    for replayed, rows in digests.items():
        if replayed != epoch and read & rows:
            return message("augmentation_of_another_epoch", replayed=replayed, epoch=epoch)
    return message("augmentation_not_restored")
