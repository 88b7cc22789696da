"""Computes a batch twice, to see what the job keeps from call to call outside of the model's buffers and attributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samestep.engine import Layout
from samestep.job import Batch, Job
from samestep.job.walk import without_graph
from samestep.reference.carried import output_and_loss
from samestep.reference.fetch import fetch, place
from samestep.reference.phases import phases_of
from samestep.reference.replica_state import ReplicaState, sums_of_frozen
from samestep.reference.schedule import step_rows, weight


@dataclass(frozen=True)
class Repeatability:
    """What two passes over the same batch, from the same state, have changed and returned.

    moved: the names of the parameters that are not trained, and that a forward pass moves: an averaged teacher's.
    losses: of each phase, the loss of a batch, and that of the same batch from the same state and random seed.
    """

    moved: list[str]
    losses: list[tuple[float, float]]


def repeatability(job: Job, device: str) -> Repeatability:
    """Computes the losses of the first batch of plain training twice."""
    model = job.model().to(device)
    rows = step_rows(job, Layout(1), 0)[0][0]
    phases = [(turn.number, turn.job) for turn in phases_of(job, model)]

    def losses() -> list[float]:
        values = []
        for number, phase in phases:
            torch.manual_seed(0)
            data = fetch(job, rows, 0, device)
            batch = Batch(data, place(0, 0, rows, 0, weight(job, rows), number))
            values.append(float(without_graph(output_and_loss, phase, model, batch)[1]))
        return values

    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.001)  # a teacher begins where the trained weights do, and would not move
        first, sums = ReplicaState(model), sums_of_frozen(model)
        once = losses()
        moved = [name for name, total in sums_of_frozen(model).items() if total != sums[name]]
        if moved:
            first.parameters = ReplicaState(job.model().to(device), moved).parameters
        first.restore(model)
        return Repeatability(moved, list(zip(once, losses(), strict=True)))
