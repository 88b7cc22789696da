"""Judges replicas by the ranks that hold the same piece of a model, where one process cannot: whether they begin and
stay alike, read other rows, and add up their gradients by the right factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samestep.judge.assembled import SliceRecord
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array
from samestep.judge.gradients import UNEXPLAINED, gradient
from samestep.judge.layout import ByHand
from samestep.judge.loss_weight import loss_weight
from samestep.judge.rows import order, rows
from samestep.judge.step_gradients import StepGradients
from samestep.judge.updates import initial_weights, weights
from samestep.message import Message, message
from samestep.records.divided_models import SMALL
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import STEP, TAKEN, of_kind

Unclipped = Mapping[int, Mapping[str, Array]]
GRAVEST = ("differs", "unknown", "warning", "right")


def loss_weights_of_slices(
    layout: ByHand, axis: str, ranks: Ranks, record: Record, unclipped: Unclipped | None = None
) -> list[Finding]:
    """Answers 'loss weight' of ranks that hold the same piece: the gravest answer of all slices; none where their
    records do not tell, and where some hold experts, of which each has a loss of other rows.

    unclipped: rank of the first replica -> what the only rank of a replay, which stood for all replicas, has in its
    place of the first step's gradients, before anything clips them; None: the ranks' own gradients tell.
    """
    if axis == "expert":
        return []
    if unclipped is not None:
        slices = [[rank.rank for rank in ranks]] if axis == "sequence" else [*map(layout.same, layout.replicas[0])]
        answers = []
        for numbers in slices:
            of_slice = [ranks[number] for number in numbers]
            step_gradients = StepGradients.read(SliceRecord(record.folder, layout.replicas), of_slice, 0)
            gradients = step_gradients.reduced_to([unclipped[layout.like(number)] for number in numbers])
            answers.append([_along_data(loss_weight(gradients, of_slice, 0), numbers)] if gradients else [])
        return _gravest(answers) if all(answers) else []
    # Along a sequence each rank has a loss of its own piece.
    findings = gradient(ranks, record) if axis == "sequence" else _gradients(layout, ranks, record)
    return [finding for finding in findings if finding.question == "loss weight"]


def unclipped_gradients(layout: ByHand, replay: Record) -> Unclipped:
    """Returns the gradients of a replay that has made them small, as large as they were."""
    taken = of_kind(replay.arrays(STEP.format(0)), TAKEN)
    found: dict[int, dict[str, Array]] = {}
    for rank in layout.replicas[0]:
        prefix = f"rank {rank}: "
        held = {name.removeprefix(prefix): array for name, array in taken.items() if name.startswith(prefix)}
        found[rank] = {name: array / SMALL for name, array in held.items()}
    return found


def _gradients(layout: ByHand, ranks: Ranks, record: Record) -> list[Finding]:
    """Answers 'gradient' and 'loss weight' of each slice, and returns the gravest answers."""
    of_slices = SliceRecord(record.folder, layout.replicas)
    slices = [layout.same(rank) for rank in layout.replicas[0]]
    answers = [
        [_along_data(finding, numbers) for finding in gradient([ranks[n] for n in numbers], of_slices)]
        for numbers in slices
    ]
    return _gravest(answers)


def _gravest(answers: list[list[Finding]]) -> list[Finding]:
    """Returns one answer to each question that all slices have answered."""
    found = []
    for question in dict.fromkeys(finding.question for of_slice in answers for finding in of_slice):
        of_all = [finding for of_slice in answers for finding in of_slice if finding.question == question]
        if len(of_all) >= len(answers) or any(finding.answer == "differs" for finding in of_all):
            found.append(min(of_all, key=lambda finding: GRAVEST.index(finding.answer)))
    return found


def _along_data(finding: Finding, numbers: list[int]) -> Finding:
    """Returns an answer about the ranks of a slice, by their numbers among all."""
    divergence, said = finding.divergence, finding.message
    if divergence is None:
        return finding
    if said.id == "ranks_begin_with_different_weights":
        said = message("replica_begins_apart", axis="data", different=said.fields["different"], plan=None)
    elif said.id == "ranks_weights_drift_apart":
        said = message("replica_drifts_apart", axis="data")
    elif said.id == "ranks_train_the_same_rows":
        said = message("replicas_train_the_same_rows", axis="data", replicas=len(numbers))
    fields: dict[str, Any] = {
        name: numbers[said.fields[name]] for name in ("rank", "other") if isinstance(said.fields.get(name), int)
    }
    if isinstance(places := said.fields.get("ranks"), list):
        fields["ranks"] = [numbers[place] for place in places]
    said = Message(said.id, {**said.fields, **fields})
    rank = None if divergence.rank is None else numbers[divergence.rank]
    quantity = f"{divergence.quantity} along data"
    return replace(finding, message=said, divergence=replace(divergence, rank=rank, quantity=quantity, cause=said))


def findings_along_data(layout: ByHand, ranks: Ranks, record: Record) -> list[Finding]:
    """Answers what must hold of replicas, where it is not known how the ranks of each divide the model."""
    if not layout.is_one_model or len(layout.replicas) == 1:
        return []
    answers = []
    for numbers in (layout.same(rank) for rank in layout.replicas[0]):
        of_slice = [ranks[number] for number in numbers]
        asked = [initial_weights(of_slice), rows(of_slice), order(of_slice), weights(of_slice)]
        answers.append([_along_data(finding, numbers) for finding in asked])
    found = [*_gravest(answers), *_gradients(layout, ranks, record)]
    return [_said(finding) for finding in found]


def _said(finding: Finding) -> Finding:
    if finding.answer == "differs" and finding.message.id in UNEXPLAINED:
        return Finding(finding.question, "unknown", message("of_the_same_pieces", answer=finding.message))
    if finding.answer == "differs":
        return finding
    return replace(finding, message=message("of_the_same_pieces", answer=finding.message))
