"""Gathers the outputs and the data of all ranks, so that a criterion sees all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.data.same_data import gather_from_ranks
from samestep.data.schedule import Schedule, key
from samestep.errors import Refused
from samestep.job import Batch, Job, MicroBatch
from samestep.job.walk import flattened, leaves_of
from samestep.world import World


@dataclass(frozen=True)
class RankTensors:
    """The sizes of one rank's tensors, which all ranks learn before the tensors are sent.

    rows: the number of the rank's rows, and weight: their weight. structure: of its output and data, with the leaves'
    dtypes. shapes: of each leaf; None: not a tensor. by_row: whether a leaf's first dimension is the rank's rows.
    """

    rows: int
    weight: float
    structure: str
    shapes: list[tuple[int, ...] | None]
    by_row: list[bool]


def loss_over_all_rows(job: Job, output: Any, batch: Batch, schedule: Schedule, world: World) -> Tensor:
    """Computes the criterion once on the rows of all ranks. What it draws is the same on every rank.

    On each rank the loss has the graph of that rank's own rows: the sum of the ranks' gradients is that of one process.
    """
    alone = replace(schedule, world_size=1)
    (whole,) = alone.step(0, batch.micro_batch.epoch, batch.micro_batch.step % alone.steps_per_epoch)
    gathered = gather_rows(output, batch, whole, world)
    torch.manual_seed(key(job.seed, "all rows", whole.step))
    return job.criterion(*gathered)


def gather_rows(output: Any, batch: Batch, whole: MicroBatch, world: World) -> tuple[Any, Batch]:
    """Returns the output and the batch of the whole step: the rows of all ranks in the order of the ranks.

    Tensors whose first dimension is the rank's rows are concatenated. Other floating-point tensors of the output, such
    as a learned temperature, become their mean over the ranks, by the weights of the ranks' rows. All else stays the
    rank's own. Only the rank's own part carries its graph, so that backward needs no collective: the gradients of all
    ranks add up to that of one process.
    whole: the part of a single process in this step. Every rank must call this, one without rows too, whose rows are
    left out. Raises Refused, on all ranks, where their tensors do not fit together.
    """
    micro_batch = batch.micro_batch
    leaves, rebuilt = flattened((output, batch.data))
    of_output = len(leaves_of(output))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    mine = RankTensors(
        rows=micro_batch.rows,
        weight=micro_batch.weight,
        structure=f"{rebuilt(range(len(leaves)))} {[None if t is None else t.dtype for t in tensors]}",
        shapes=[None if t is None else tuple(t.shape) for t in tensors],
        by_row=[t is not None and t.dim() > 0 and len(t) == len(micro_batch.indices) for t in tensors],
    )
    ranks: list[RankTensors] = gather_from_ranks(mine, world)
    by_row = [all(rank.by_row[n] for rank in ranks if rank.rows) for n in range(len(leaves))] if _alike(ranks) else []
    averaged = [not by_row[n] and n < of_output and _is_floating(t) for n, t in enumerate(tensors)] if by_row else []
    _check_shapes(ranks, by_row, averaged, micro_batch.step)
    own = [t[: micro_batch.rows] if t is not None and by_row[n] else t for n, t in enumerate(tensors)]
    sent = [n for n in range(len(leaves)) if by_row[n] or averaged[n]]
    shapes = [[(rank.rows, *_shape(rank, n)[1:]) if by_row[n] else _shape(rank, n) for n in sent] for rank in ranks]
    of_rank = _all_gather([_tensor(own[n]) for n in sent], shapes, world)
    total = sum(rank.weight for rank in ranks)
    for at, n in enumerate(sent):
        parts = [pieces[at] for pieces in of_rank]
        parts[world.rank] = _tensor(own[n])  # the same values, with their graph
        if by_row[n]:
            leaves[n] = torch.cat(parts)
        else:
            shares = [rank.weight / total for rank in ranks]
            leaves[n] = sum((p * share for p, share in zip(parts[1:], shares[1:])), parts[0] * shares[0])
    output, data = rebuilt(leaves)
    return output, Batch(data, whole)


def _alike(ranks: list[RankTensors]) -> bool:
    return all(rank.structure == ranks[0].structure for rank in ranks)


def _shape(rank: RankTensors, number: int) -> tuple[int, ...]:
    shape = rank.shapes[number]
    assert shape is not None
    return shape


def _tensor(leaf: Tensor | None) -> Tensor:
    assert leaf is not None
    return leaf


def _is_floating(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _check_shapes(ranks: list[RankTensors], by_row: list[bool], averaged: list[bool], step: int) -> None:
    """Raises Refused where the ranks' tensors cannot be put together: all ranks know the same, and raise the same."""
    for rank, other in enumerate(ranks):
        if other.structure != ranks[0].structure:
            raise Refused(
                f"step {step}: rank {rank}'s output and batch have another structure than rank 0's; gather_outputs "
                "needs the same structure of tensors on every rank (and no lists of texts)"
            )
        for number, together in enumerate(by_row):
            pair = [_shape(r, number)[1:] if together else r.shapes[number] for r in (ranks[0], other)]
            if (together or averaged[number]) and pair[0] != pair[1]:
                raise Refused(
                    f"step {step}: gather_outputs finds a tensor of {list(_shape(ranks[0], number))} on rank 0 and of "
                    f"{list(_shape(other, number))} on rank {rank}; all dimensions but the first must have "
                    "the same size on every rank: pad to one length in collate"
                )


def _all_gather(mine: list[Tensor], shapes: list[list[tuple[int, ...]]], world: World) -> list[list[Tensor]]:
    """Returns every rank's tensors, without a graph. shapes: [rank][tensor]. All are sent at once, as bytes."""
    packed = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in mine])
    sizes = [[t.element_size() * torch.Size(s).numel() for t, s in zip(mine, of_rank)] for of_rank in shapes]
    most = max(map(sum, sizes))
    padded = packed.new_zeros(most)
    padded[: len(packed)] = packed
    received = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(received, padded)
    return [
        # cloned: a view as another dtype must begin at a multiple of its size
        [
            piece.clone().view(t.dtype).reshape(shape)
            for piece, t, shape in zip(flat[: sum(of)].split(of), mine, of_shapes)
        ]
        for flat, of, of_shapes in zip(received, sizes, shapes)
    ]
