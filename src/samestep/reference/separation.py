"""Computes a few rows alone, in pairs, together and twice, to see why ranks do not add up to one process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samestep.bounds import MEAN_OF_ROWS_APART, MEAN_OF_ROWS_LEAST, PADDED
from samestep.engine import Layout
from samestep.job import Batch, Job
from samestep.job.walk import leaves_of, without_graph
from samestep.records.reference_record import SeparationRecord
from samestep.reference.faulty_training import summed
from samestep.reference.fetch import StepRows, fetch, place, row_keys, weight_of_batch
from samestep.reference.held_randomness import HeldRandomness, RowDimensions
from samestep.reference.optimizers import phases_of
from samestep.reference.replica_state import ReplicaState, output_and_loss, sums_of_parameters
from samestep.reference.schedule import per_epoch, step_rows, weight

ROWS = 6
STEPS = 8  # of an epoch, whose losses and gradients are looked at where those of six rows say nothing


def row_dimensions(job: Job, device: str) -> RowDimensions:
    """Finds where the rows are in the random numbers that the job draws; nothing where it takes no copies of a row."""
    row, held_randomness, model = step_rows(job, Layout(1), 0)[0][0][0], HeldRandomness(), job.model().to(device)
    phases = phases_of(job, model)

    def compute(rows: int) -> None:
        copies = [row] * rows
        batch = Batch(fetch(job, copies, 0, device), place(0, 0, copies, 0, weight(job, copies)))
        for phase in phases:
            _seeded(held_randomness, range(rows))
            with held_randomness:
                without_graph(output_and_loss, phase.job, model, batch)

    try:
        with torch.no_grad():
            return held_randomness.learn(compute)
    except Exception:  # of the job's functions: what they do not take is found elsewhere
        return {}


def _seeded(held_randomness: HeldRandomness, rows: Sequence[int]) -> None:
    held_randomness.rows = rows
    torch.manual_seed(0)


def separate(
    job: Job, device: str, held_randomness: HeldRandomness, moved: Collection[str] = (), rows: Sequence[int] = ()
) -> SeparationRecord:
    """Evaluates the criterion on a few rows, as `held_randomness` holds random numbers and batch statistics.

    Where their losses say nothing, as those of a triplet loss on rows of six classes do, all rows of a step are taken
    whose loss is not the mean of its halves'. Of several phases: returns the first whose losses are not the mean of
    their rows' losses, else the last, with how far the gradients are from being such means.

    moved: the parameters that the forward pass moves. rows: of the first ones; the first step's follow.

    Each loss is that of an untrained model which has seen nothing before. Only `again` is computed right after
    `whole`, by the model that has computed `whole`.
    """
    chosen = list(dict.fromkeys([*rows[: ROWS - 2], *step_rows(job, Layout(1), 0)[0][0]]))[:ROWS]
    phases = [phase.job for phase in phases_of(job, job.model())]
    for phase in phases:
        separation = _separate(phase, chosen, device, held_randomness, moved)
        mean = sum(w * loss for w, loss in zip(separation.weights, separation.alone)) / (sum(separation.weights) or 1.0)
        if not _alike(separation.whole, mean):
            return separation
    steps = [[row for (part,) in step_rows(job, Layout(1), step) for row in part] for step in range(_steps(job))]
    gaps: list[float] = []
    for phase in phases:
        for step in steps:
            losses = _Losses(phase, step, device, held_randomness, moved)
            with torch.no_grad():
                whole_loss, mean = losses.of(step)[0], losses.mean_of_halves(step)
            if isfinite(whole_loss) and not _alike(whole_loss, mean):
                return _separate(phase, step, device, held_randomness, moved)
            gaps += [gap for gap in [losses.gradient_gap(step)] if gap is not None]
    return replace(separation, gradient_gap=max(gaps, default=None))


def _alike(loss: float, mean: float) -> bool:
    return isclose(loss, mean, rel_tol=MEAN_OF_ROWS_APART, abs_tol=MEAN_OF_ROWS_LEAST)


def _steps(job: Job) -> int:
    """How many steps' losses are looked at: those of an epoch, but not many."""
    return min(per_epoch(job), STEPS)


def _separate(
    job: Job, rows: list[int], device: str, held_randomness: HeldRandomness, moved: Collection[str]
) -> SeparationRecord:
    with torch.no_grad():
        losses = _Losses(job, rows, device, held_randomness, moved)
        together, output = losses.of(rows)
        moved = losses.moved()
        again, _ = losses.of(rows, fresh=False)
        alone = [losses.of([row]) for row in rows]
        # A row that weighs nothing has no loss, or one of 0 where the divisor is at least 1: with it pairs say nothing.
        paired = next((number for number, (loss, _) in enumerate(alone) if loss and isfinite(loss)), 0)
        pairs = [losses.of([rows[paired], row])[0] for row in rows if row != rows[paired]]
        half = len(rows) // 2
        halves = [losses.of(part)[0] for part in (rows[:half], rows[half:])] if half else [together, 0.0]
        outputs, padded = [output for _, output in alone], losses.padded(rows)
    return SeparationRecord(
        weights=[losses.weight([row]) for row in rows],
        whole=together,
        again=again,
        alone=[loss for loss, _ in alone],
        paired=paired,
        pairs=pairs,
        halves=halves,
        output_gap=_output_gap(output, outputs),
        moved=moved,
        unknown=sorted(held_randomness.unknown),
        collate_draws=held_randomness.holds_collate,
        padded=any(padded)
        and not (_output_gap(output, outputs, [not is_padded for is_padded in padded]) or 0) > PADDED,
    )


class _Losses:
    """The losses of an untrained model of `job` on some of `rows`."""

    def __init__(
        self, job: Job, rows: list[int], device: str, held_randomness: HeldRandomness, moved: Collection[str]
    ) -> None:
        self.job, self.device, self.held_randomness = job, device, held_randomness
        self.together = StepRows(job, rows, 0, device) if held_randomness.holds_collate else None
        self.model: nn.Module = job.model().to(device)
        self.first = ReplicaState(self.model, moved)

    def of(self, rows: list[int], *, fresh: bool = True) -> tuple[float, Any]:
        """The mean loss of `rows`, NaN where the criterion refuses them, and the model's output."""
        if fresh:
            self.first.restore(self.model)
        data = self._data(rows)
        _seeded(self.held_randomness, row_keys(rows))
        batch = Batch(data, place(0, 0, rows, 0, weight_of_batch(self.job, rows, data, 0, 0)))
        try:
            with self.held_randomness:
                output, loss = without_graph(output_and_loss, self.job, self.model, batch)
                return float(loss), output
        except (RuntimeError, ValueError, IndexError):  # of one row alone, for instance
            return float("nan"), None

    def mean_of_halves(self, rows: list[int]) -> float:
        """The mean of the losses of both halves of `rows`, as two ranks compute them. One that weighs nothing has none;
        NaN where the criterion refuses one."""
        halves = [part for part in _halves(rows) if self.weight(part)]
        weights = [self.weight(part) for part in halves]
        return sum(weight * self.of(part)[0] for weight, part in zip(weights, halves)) / (sum(weights) or 1.0)

    def gradient_gap(self, rows: list[int]) -> float | None:
        """How far the gradient of `rows` is from the mean of both halves', as a share of its largest value; None where
        it cannot be computed."""
        halves = [part for part in _halves(rows) if self.weight(part)]
        total = sum(self.weight(part) for part in halves)
        try:
            whole_gradient = self._gradient(rows, 1.0)
            parts = [self._gradient(part, self.weight(part) / total) for part in halves]
        except (RuntimeError, ValueError, IndexError):
            return None
        pairs = [(a, b) for a, b in zip(whole_gradient, summed(parts)) if a is not None and b is not None]
        largest = max((float(gradient.abs().max()) for gradient, _ in pairs if gradient.numel()), default=0.0)
        gap = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
        return gap / largest if largest and isfinite(gap) else None

    def _gradient(self, rows: list[int], share: float) -> list[Tensor | None]:
        """The gradient of the mean loss of `rows`, by each parameter, times `share`: hooks act on what a rank has."""
        self.first.restore(self.model)
        for parameter in self.model.parameters():
            parameter.grad = None
        data = self._data(rows)
        _seeded(self.held_randomness, row_keys(rows))
        batch = Batch(data, place(0, 0, rows, 0, weight_of_batch(self.job, rows, data, 0, 0)))
        with self.held_randomness:
            output_and_loss(self.job, self.model, batch)[1].backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [None if gradient is None else gradient * share for gradient in gradients]

    def padded(self, rows: list[int]) -> list[bool]:
        """Of each row, whether it is longer beside the others than alone."""
        shapes = [tuple(leaf.shape[1:]) for leaf in _tensors(self._data(rows))]
        return [shapes != [tuple(leaf.shape[1:]) for leaf in _tensors(self._data([row]))] for row in rows]

    def weight(self, rows: list[int]) -> float:
        return weight_of_batch(self.job, rows, self._data(rows), 0, 0)

    def _data(self, rows: list[int]) -> Any:
        return self.together.of(rows) if self.together else fetch(self.job, rows, 0, self.device)

    def moved(self) -> list[str]:
        """The buffers and attributes of the model that its latest forward pass has changed; not BatchNorm's counts."""
        changed = self.first.changed(ReplicaState(self.model))
        return [name for name in changed if not name.endswith("num_batches_tracked")]


def _halves(rows: list[int]) -> list[list[int]]:
    half = len(rows) // 2
    return [part for part in (rows[:half], rows[half:]) if part]


def _tensors(data: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor)]


def _output_gap(together: Any, alone: list[Any], compared: Sequence[bool] = ()) -> float | None:
    """How far a row's output alone is from that beside other rows, relative to its largest value.

    compared: which rows are; all where empty. None where they cannot be compared: a row has another shape alone.
    """
    count = len(alone)
    gap: float | None = None
    for number, output in enumerate(alone):
        if compared and not compared[number]:
            continue
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

    changed: the names of the parameters that a forward pass changes. moved: of them, those that are not trained: an
    averaged teacher's. written: of them, those that are set to values of the rows, as by ActNorm's first pass.
    losses: of each phase, the loss of a batch, and that of the same batch from the same state and random seed.
    """

    changed: list[str]
    moved: list[str]
    written: list[str]
    losses: list[tuple[float, float]]


def repeatability(job: Job, device: str) -> Repeatability:
    """Computes the losses of the first batch of plain training twice; once those of the second one, where a forward
    pass changes parameters."""

    def untrained() -> nn.Module:
        model = job.model().to(device)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.001)  # a teacher begins where the trained weights do, and would not move
        return model

    def losses(model: nn.Module, step: int) -> list[float]:
        rows, epoch = step_rows(job, Layout(1), step)[0][0], step // per_epoch(job)
        values = []
        for phase in phases_of(job, model):
            torch.manual_seed(0)
            data = fetch(job, rows, epoch, device)
            batch = Batch(data, place(0, 0, rows, epoch, weight(job, rows), phase.number))
            values.append(float(without_graph(output_and_loss, phase.job, model, batch)[1]))
        return values

    with torch.no_grad():
        model = untrained()
        first, sums = ReplicaState(model), sums_of_parameters(model)
        once = losses(model, 0)
        changed = [name for name, total in sums_of_parameters(model).items() if total != sums[name]]
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        written: list[str] = []
        if changed:
            after, second_model = ReplicaState(model, changed).parameters, untrained()
            first.parameters = ReplicaState(second_model, changed).parameters
            losses(second_model, 1)
            after_other = ReplicaState(second_model, changed).parameters
            written = [name for name in changed if not torch.equal(after[name], after_other[name])]
        first.restore(model)
        again = losses(model, 0)
    moved = [name for name in changed if name in frozen]
    return Repeatability(changed, moved, written, list(zip(once, again, strict=True)))
