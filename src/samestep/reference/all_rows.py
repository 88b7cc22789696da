"""Losses over all rows: the criterion once on the outputs of all replicas, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.errors import Refused, not_a_scalar
from samestep.job import Batch, Job
from samestep.job.walk import leaves_of, mapped
from samestep.reference.fetch import place, random_state, seed


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
