"""Computes over the rows of all replicas at once: the criterion on all outputs, the model where BatchNorm is synced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import Refused, UserError, not_a_scalar
from samestep.job import Batch, Job
from samestep.job.walk import leaves_of, mapped, mapped_tensors
from samestep.reference.fetch import fetch, place, random_state, seed
from samestep.reference.noise import Noise
from samestep.reference.schedule import weight


@dataclass(frozen=True)
class AllRows:
    """The loss of all replicas' rows together, and its gradients.

    loss: over all rows. gradients: replica -> the loss's by each leaf of its output, None where it has none. batches:
    replica -> its own rows, as its output was computed from them. draws: whether the criterion draws random numbers.
    """

    loss: float
    gradients: dict[int, list[Tensor | None]]
    batches: dict[int, Batch]
    draws: bool

    def stand_in(self, replica: int, output: Any) -> Tensor:
        """A scalar with the loss's gradient by this replica's `output`, which was computed again."""
        terms = [
            (leaf * gradient).sum()
            for leaf, gradient in zip(leaves_of(output), self.gradients[replica], strict=True)
            if gradient is not None
        ]
        return torch.stack(terms).sum() if terms else torch.zeros(())


def over_all_rows(job: Job, outputs: dict[int, Any], batches: dict[int, Batch], device: str) -> AllRows:
    """Computes the criterion of all rows and its gradients. outputs, batches: of each replica that has rows."""
    first, *_ = batches.values()
    rows = [int(row) for batch in batches.values() for row in batch.micro_batch.indices]
    weights = [batch.micro_batch.weight for batch in batches.values()]
    counts = [batch.micro_batch.rows for batch in batches.values()]
    tracked = {replica: mapped(_tracked, output) for replica, output in outputs.items()}
    micro_batch = place(
        first.micro_batch.step,
        first.micro_batch.micro,
        rows,
        first.micro_batch.epoch,
        sum(weights),
        first.micro_batch.phase,
    )
    data = mapped(lambda *leaves: _joined(leaves, counts, None), *(batch.data for batch in batches.values()))
    seed(device, job.seed, "all rows", first.micro_batch.step)
    before = random_state(device)
    output = mapped(lambda *leaves: _joined(leaves, counts, weights), *tracked.values())
    loss = job.criterion(output, Batch(data, micro_batch))
    draws = not torch.equal(before, random_state(device))
    if loss.dim() != 0:
        raise not_a_scalar(list(loss.shape))
    loss.backward()
    gradients = {
        replica: [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves_of(output)]
        for replica, output in tracked.items()
    }
    return AllRows(float(loss.detach()), gradients, batches, draws)


def _tracked(leaf: Any) -> Any:
    """A copy that collects the gradient by itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _joined(leaves: Sequence[Any], counts: list[int], weights: list[float] | None) -> Any:
    """Rows are put one after the other; with `weights`, what is no row is averaged over the replicas."""
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves[0]
    if all(leaf.dim() and len(leaf) == count for leaf, count in zip(leaves, counts)):
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise Refused(
                f"gather_outputs finds tensors of {[list(leaf.shape) for leaf in leaves]} on the ranks: all dimensions "
                "but the first must have the same size; pad to one length in collate"
            )
        return torch.cat(list(leaves))
    if weights is None or not leaves[0].is_floating_point():
        return leaves[0]
    if len({leaf.shape for leaf in leaves}) > 1:
        raise Refused(
            f"gather_outputs finds tensors of {[list(leaf.shape) for leaf in leaves]} in the ranks' outputs, whose "
            "first dimension is not their rows; return tensors whose first dimension is the rows"
        )
    total = sum(weights)
    return torch.stack([leaf * (weight / total) for leaf, weight in zip(leaves, weights)]).sum(0)


def synced_outputs(
    job: Job,
    model: nn.Module,
    of_replica: list[list[int]],
    step: int,
    micro: int,
    epoch: int,
    noise: Noise | None,
    phase: int = 0,
) -> list[Any]:
    """Each replica's output. Raises UserError for a model that draws random numbers, which would fall on other rows."""
    if job.carry_state:
        raise UserError("the proof takes sync_batchnorm or carry_state, not both; verify it with one of them")
    device = str(next(model.parameters()).device)
    rows = [row for rows in of_replica for row in rows]
    data = fetch(job, rows, epoch, device)
    before = random_state(device)
    micro_batch = place(step, micro, rows, epoch, weight(job, rows), phase)
    batch = Batch(noise.perturbed(data) if noise else data, micro_batch)
    output = job.forward(model, batch)
    if not torch.equal(before, random_state(device)):
        raise UserError(
            "the proof of sync_batchnorm runs all ranks' rows at once, and dropout would fall on others than on the "
            "ranks; verify it without dropout, or without sync_batchnorm"
        )
    ends = list(accumulate(map(len, of_replica)))
    return [_rows(output, first, last, len(rows)) for first, last in zip([0, *ends], ends)]


def _rows(output: Any, first: int, last: int, rows: int) -> Any:
    return mapped_tensors(lambda t: t[first:last] if t.dim() and len(t) == rows else t, output)
