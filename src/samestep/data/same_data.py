"""Checks that all ranks read the same data, because each process builds the job, and its datasets, by itself."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from samestep.data.loader import fetch, workers_of
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.data.workers import fetched
from samestep.errors import UserError
from samestep.job import Job
from samestep.job.walk import leaves_of
from samestep.world import World


def check_same_data(job: Job, world: World, *, training: bool = True) -> None:
    """Compares the datasets' lengths, some samples, and an order of the job's own, between the ranks.

    Does nothing with one rank or without an open process group. Samples that change each time they are read are not
    compared, nor are a stream's, which would have to be read up to them. training: also check the training's dataset.
    Raises UserError where a rank differs from rank 0.
    """
    if world.size == 1 or not dist.is_initialized():
        return
    if training:
        _check("training", job, world)
        _check_order(job, world)
    if job.evaluation is not None:
        _check("evaluation", replace(job, train=job.evaluation, order=None, carry_state=False, last="keep"), world)


def _check(name: str, job: Job, world: World) -> None:
    """Compares `job.train` between the ranks. name: of the dataset, for the error."""
    of_rank = gather_from_ranks(_fingerprint(job), world)
    for rank, (length, digests) in enumerate(of_rank):
        first_length, first = of_rank[0]
        difference = None
        if length != first_length:
            difference = f"has {length} {name} samples, and rank 0 {first_length}"
        for index, digest in digests.items():
            if difference is None and digest != first.get(index, digest):
                difference = f"reads other values than rank 0 for {name} sample {index}"
        if difference:
            raise UserError(
                f"rank {rank} {difference}: each process builds the job for itself, and all must build the same; sort "
                "the files of a folder, and seed or save what is random or learnt (a split, a vocabulary)"
            )


def _check_order(job: Job, world: World) -> None:
    """Compares the first epoch's order between the ranks, where it is the job's own."""
    if job.order is None:
        return
    order = schedule_of(job, 1).order(0)
    digests = gather_from_ranks(hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest(), world)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(
                f"rank {rank} has another order than rank 0: each process builds the job for itself, and Job.order "
                "must be the same in all; draw from the generator that it is given, and sort what it is made of"
            )


def gather_from_ranks(mine: Any, world: World) -> list[Any]:
    """Returns every rank's `mine`, in rank order, on every rank. Needs an open process group when world.size > 1."""
    of_rank: list[Any] = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(of_rank, mine)
    return of_rank


class _Fingerprinter:
    """Computes a dataset's fingerprint in a loader worker, which indexes this object as if it were Rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, part: Any) -> tuple[Any, Any]:
        return part, _fingerprint_of(self.dataset)


def _fingerprint(job: Job) -> Any:
    """Computes the fingerprint of `job.train`, in a loader worker if the job has any.

    Many datasets open their files at the first read. If that happened here, the loader workers that are forked later
    would share the files' positions.
    """
    if not workers_of(job):
        return _fingerprint_of(job.train)
    with closing(fetched(_Fingerprinter(job.train), [0], 1, 1)) as answers:  # type: ignore[list-item]
        return next(answers).data


def _fingerprint_of(dataset: Any) -> tuple[int, dict[int, str]]:
    """Returns the length, and index -> digest of some samples, without those that change when read again."""
    length = len(dataset)
    rows = [] if is_stream(dataset) else sorted({0, length // 3, 2 * length // 3, length - 1})
    try:
        first, again = ([_digest(sample) for sample in fetch(dataset, rows)] for _ in range(2))
    except Exception:  # the training will raise it again, with the sample and the traceback
        return length, {}
    return length, {index: one for index, one, other in zip(rows, first, again) if one == other}


def _digest(sample: Any) -> str:
    """Returns a digest of a sample's tensors, arrays, numbers and texts. repr() of other objects may hold addresses."""
    state = hashlib.blake2b(digest_size=8)
    for leaf in leaves_of(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().float().numpy() if leaf.is_floating_point() else leaf.detach().cpu().numpy()
        if isinstance(leaf, np.ndarray | np.generic):
            state.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            state.update(repr(leaf).encode())
    return state.hexdigest()
