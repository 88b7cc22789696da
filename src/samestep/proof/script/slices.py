"""What ranks that hold the same piece of a model tell of their replicas, where one process cannot: by which factor
gradients are scaled that are added up over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from samestep.proof.script.by_hand import Division
from samestep.proof.script.findings import Ranks
from samestep.proof.script.gradients import gradient
from samestep.proof.script.layout import LOCAL_KIND, Array, is_near, parameter_of
from samestep.records.record import Record
from samestep.records.script import Finding


@dataclass(frozen=True)
class SliceRecord(Record):
    """The folder of a launch, in which each rank's own gradient of what a replica's ranks all hold is the replica's:
    their sum, where each has computed another one, of its piece of a sequence."""

    division: Division | None = None

    def arrays(self, name: str, rank: int = 0) -> dict[str, Array]:
        """Returns a rank's arrays."""
        arrays, division = super().arrays(name, rank), self.division
        assert division is not None
        others = [super(SliceRecord, self).arrays(name, r) for r in division.layout.replica_of(rank) if r != rank]
        for key, array in arrays.items():
            parameter = parameter_of(key)
            is_copy = parameter in division.held and not division.is_divided(parameter)
            if not is_copy or not key.startswith(f"{LOCAL_KIND} "):
                continue
            parts = [array, *(other[key] for other in others if key in other)]
            if not all(is_near(part, array) for part in parts):
                total: Array = np.sum(parts, axis=0)
                arrays[key] = total
        return arrays


def loss_weights_of_slices(division: Division, ranks: Ranks, record: Record) -> list[Finding]:
    """Answers 'loss weight' of ranks that hold the same piece: the gravest answer of all slices; none where their
    records do not tell, and where some hold experts, of which each has a loss of other rows."""
    layout = division.layout
    if division.axis == "expert":
        return []
    slices = [layout.same(rank) for rank in layout.replicas[0]]
    of_slices: Record = SliceRecord(record.folder, division)
    if division.axis == "sequence":  # each of whose ranks has a loss of its own piece
        slices, of_slices = [[rank.rank for rank in ranks]], record
    found = []
    for numbers in slices:
        findings = gradient([ranks[number] for number in numbers], of_slices)
        weights = [finding for finding in findings if finding.question == "loss weight"]
        if not weights:
            return []
        divergence = weights[0].divergence
        if divergence and divergence.rank is not None:
            divergence = replace(divergence, rank=numbers[divergence.rank])
        found.append(replace(weights[0], divergence=divergence))
    answers = ("differs", "unknown", "right")
    return [min(found, key=lambda finding: answers.index(finding.answer))]
