"""Computes a few rows alone, in pairs, together and twice, to see why ranks do not add up to one process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine import Layout
from samestep.job import Batch, Job
from samestep.job.walk import leaves_of, without_graph
from samestep.records.record import SeparationRecord
from samestep.reference.fetch import StepRows, fetch, place, row_keys, weight_of_batch
from samestep.reference.neutral import Neutral, RowDimensions
from samestep.reference.optimizers import phases_of
from samestep.reference.replica_state import ReplicaState, output_and_loss, sums_of_frozen
from samestep.reference.schedule import step_rows, weight

ROWS = 6


def row_dimensions(job: Job, device: str) -> RowDimensions:
    """Finds where the rows are in the random numbers that the job draws; nothing where it takes no copies of a row."""
    row, neutral, model = step_rows(job, Layout(1), 0)[0][0][0], Neutral(), job.model().to(device)
    phases = phases_of(job, model)

    def compute(rows: int) -> None:
        copies = [row] * rows
        batch = Batch(fetch(job, copies, 0, device), place(0, 0, copies, 0, weight(job, copies)))
        for phase in phases:
            _seeded(neutral, range(rows))
            with neutral:
                without_graph(output_and_loss, phase.job, model, batch)

    try:
        with torch.no_grad():
            return neutral.learn(compute)
    except Exception:  # of the job's functions: what they do not take is found elsewhere
        return {}


def _seeded(neutral: Neutral, rows: Sequence[int]) -> None:
    neutral.rows = rows
    torch.manual_seed(0)


def separate(
    job: Job, device: str, neutral: Neutral, moved: Collection[str] = (), rows: Sequence[int] = ()
) -> SeparationRecord:
    """Evaluates the criterion on a few rows, as `neutral` holds random numbers and batch statistics.

    Of several phases: returns the first whose losses are not the mean of their rows' losses, else the last.

    moved: the parameters that the forward pass moves. rows: of the first ones; the first step's follow.

    Each loss is that of an untrained model which has seen nothing before. Only `again` is computed right after
    `whole`, by the model that has computed `whole`.
    """
    chosen = list(dict.fromkeys([*rows[: ROWS - 2], *step_rows(job, Layout(1), 0)[0][0]]))[:ROWS]
    for phase in phases_of(job, job.model()):
        separation = _separate(phase.job, chosen, device, neutral, moved)
        mean = sum(w * loss for w, loss in zip(separation.weights, separation.alone)) / (sum(separation.weights) or 1.0)
        if not isclose(separation.whole, mean, rel_tol=1e-6, abs_tol=1e-9):
            break
    return separation


def _separate(job: Job, rows: list[int], device: str, neutral: Neutral, moved: Collection[str]) -> SeparationRecord:
    with torch.no_grad():
        losses = _Losses(job, rows, device, neutral, moved)
        together, output = losses.of(rows)
        moved = losses.moved()
        again, _ = losses.of(rows, fresh=False)
        alone = [losses.of([row]) for row in rows]
        # A row that weighs nothing has no loss, or one of 0 where the divisor is at least 1: with it pairs say nothing.
        paired = next((number for number, (loss, _) in enumerate(alone) if loss and isfinite(loss)), 0)
        pairs = [losses.of([rows[paired], row])[0] for row in rows if row != rows[paired]]
        half = len(rows) // 2
        halves = [losses.of(part)[0] for part in (rows[:half], rows[half:])] if half else [together, 0.0]
    return SeparationRecord(
        weights=[losses.weight([row]) for row in rows],
        whole=together,
        again=again,
        alone=[loss for loss, _ in alone],
        paired=paired,
        pairs=pairs,
        halves=halves,
        output_gap=_output_gap(output, [output for _, output in alone]),
        moved=moved,
        unknown=sorted(neutral.unknown),
        collate_draws=neutral.holds_collate,
    )


class _Losses:
    """The losses of an untrained model of `job` on some of `rows`."""

    def __init__(self, job: Job, rows: list[int], device: str, neutral: Neutral, moved: Collection[str]) -> None:
        self.job, self.device, self.neutral = job, device, neutral
        self.together = StepRows(job, rows, 0, device) if neutral.holds_collate else None
        self.model: nn.Module = job.model().to(device)
        self.first = ReplicaState(self.model, moved)

    def of(self, rows: list[int], *, fresh: bool = True) -> tuple[float, Any]:
        """The mean loss of `rows`, NaN where the criterion refuses them, and the model's output."""
        if fresh:
            self.first.restore(self.model)
        data = self._data(rows)
        _seeded(self.neutral, row_keys(rows))
        batch = Batch(data, place(0, 0, rows, 0, weight_of_batch(self.job, rows, data, 0, 0)))
        try:
            with self.neutral:
                output, loss = without_graph(output_and_loss, self.job, self.model, batch)
                return float(loss), output
        except (RuntimeError, ValueError, IndexError):  # of one row alone, for instance
            return float("nan"), None

    def weight(self, rows: list[int]) -> float:
        return weight_of_batch(self.job, rows, self._data(rows), 0, 0)

    def _data(self, rows: list[int]) -> Any:
        return self.together.of(rows) if self.together else fetch(self.job, rows, 0, self.device)

    def moved(self) -> list[str]:
        """The buffers and attributes of the model that its latest forward pass has changed; not BatchNorm's counts."""
        changed = self.first.changed(ReplicaState(self.model))
        return [name for name in changed if not name.endswith("num_batches_tracked")]


def _output_gap(together: Any, alone: list[Any]) -> float | None:
    """How far a row's output alone is from that beside other rows, relative to its largest value.

    None where they cannot be compared: a row has another shape alone.
    """
    count = len(alone)
    gap: float | None = None
    for number, output in enumerate(alone):
        for among, single in zip(leaves_of(together), leaves_of(output)):
            if not (isinstance(among, Tensor) and isinstance(single, Tensor) and among.is_floating_point()):
                continue
            if among.dim() == 0 or len(among) != count or among[number : number + 1].shape != single.shape:
                continue
            if single.isnan().any() and not among[number].isnan().any():  # as a deviation from one row is
                gap = max(gap or 0.0, 1.0)
                continue
            largest = float(single.abs().max()) if single.numel() else 0.0
            difference = float((among[number] - single[0]).abs().max()) if single.numel() else 0.0
            gap = max(gap or 0.0, difference / largest if largest else difference)
    return gap


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
