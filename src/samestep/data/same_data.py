"""Whether all ranks read the same data: a job that each process builds for itself may come out differently."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samestep.data.loader import fetch, workers_of
from samestep.data.stream import is_stream
from samestep.data.workers import fetched
from samestep.errors import UserError
from samestep.job import Job
from samestep.world import World


def check_same_data(job: Job, world: World, *, training: bool = True) -> None:
    """Compares the length and some samples over the ranks. Raises UserError where a rank has others than rank 0.

    Needs an open group when size > 1. Samples that are random each time they are read say nothing, nor does a stream,
    which would have to be read to where they are. training: whether the training's data is looked at, too.
    """
    if world.size == 1 or not dist.is_initialized():
        return
    if training:
        _check("training", job, world)
    if job.evaluation is not None:
        _check("evaluation", replace(job, train=job.evaluation), world)


def _check(name: str, job: Job, world: World) -> None:
    """Of `job.train`, which is called `name`."""
    of_rank = gather_from_ranks(_found(job), world)
    for rank, (length, found) in enumerate(of_rank):
        first_length, first = of_rank[0]
        what = None
        if length != first_length:
            what = f"has {length} {name} samples, and rank 0 {first_length}"
        for index, digest in found.items():
            if what is None and digest != first.get(index, digest):
                what = f"reads other values than rank 0 for {name} sample {index}"
        if what:
            raise UserError(
                f"rank {rank} {what}: each process builds the job for itself, and must come to the same; sort what a "
                "folder lists, and seed or save what is random or learnt (a split, a vocabulary)"
            )


def gather_from_ranks(mine: Any, world: World) -> list[Any]:
    """What every rank gives, in the order of the ranks, on every rank. Needs an open group when size > 1."""
    of_rank: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(of_rank, mine)
    return of_rank


class _Look:
    """What a loader worker is given in the place of rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, part: Any) -> tuple[Any, Any]:
        return part, _looked_at(self.dataset)


def _found(job: Job) -> Any:
    """As _looked_at, in a process that ends, where processes will read: a file that a dataset opens when it is first
    read must not be open already when they start, because they would share its position."""
    if not workers_of(job):
        return _looked_at(job.train)
    with closing(fetched(_Look(job.train), [0], 1, 1)) as found:  # type: ignore[list-item]
        return next(found).data


def _looked_at(dataset: Any) -> tuple[int, dict[int, str]]:
    """The length, and a digest of some samples; of those alone that are the same when they are read again."""
    length = len(dataset)
    rows = [] if is_stream(dataset) else sorted({0, length // 3, 2 * length // 3, length - 1})
    try:
        first, again = ([_digest(sample) for sample in fetch(dataset, rows)] for _ in range(2))
    except Exception:  # the training will say where it was and what is wrong
        return length, {}
    return length, {index: one for index, one, other in zip(rows, first, again) if one == other}


def _digest(sample: Any) -> str:
    """Of what has values; the text of other objects may hold their address."""
    state = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().float().numpy() if leaf.is_floating_point() else leaf.detach().cpu().numpy()
        if isinstance(leaf, np.ndarray | np.generic):
            state.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            state.update(repr(leaf).encode())
    return state.hexdigest()
