"""Checks that all ranks read the same data, because each process builds the job, and its datasets, by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from samestep.data.fingerprint import Fingerprint, fingerprint, is_same_row
from samestep.data.schedule import schedule_of
from samestep.errors import UserError
from samestep.job import Job
from samestep.world import World


def check_same_data(job: Job, world: World, *, training: bool = True) -> Mapping[str, Fingerprint]:
    """Compares the datasets' lengths, some samples, and an order of the job's own, between the ranks.

    Compares nothing with one rank or without an open process group, nor samples that change each time they are read.
    training: also look at the training's dataset. Returns this rank's fingerprints: 'training', 'evaluation'. Raises
    UserError where a rank differs from rank 0.
    """
    jobs = {"training": job} if training else {}
    if job.evaluation is not None:
        in_order = replace(job, train=job.evaluation, order=None, carry_state=False, last="keep")
        jobs["evaluation"] = replace(in_order, collate=None, augment=None)
    fingerprints = {name: fingerprint(of_dataset) for name, of_dataset in jobs.items()}
    if world.size > 1 and dist.is_initialized():
        for name, seen_data in fingerprints.items():
            _compare_rows(name, seen_data, world)
        if training:
            _compare_orders(job, world)
    return fingerprints


def _compare_rows(name: str, own_data: Fingerprint, world: World) -> None:
    """Compares a dataset between the ranks. name: of the dataset, for the error."""
    of_rank = gather_from_ranks((own_data.length, own_data.rows), world)
    for rank, (length, digests) in enumerate(of_rank):
        first_length, first = of_rank[0]
        difference = None
        if length != first_length:
            difference = f"has {length} {name} samples, and rank 0 {first_length}"
        for index, digest in digests.items():
            if difference is None and not is_same_row(digest, first.get(index, digest)):
                difference = f"reads other values than rank 0 for {name} sample {index}"
        if difference:
            raise UserError(
                f"rank {rank} {difference}: each process builds the job for itself, and all must build the same; sort "
                "the files of a folder, and seed or save what is random or learnt (a split, a vocabulary)"
            )


def _compare_orders(job: Job, world: World) -> None:
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


def gather_from_ranks(value: Any, world: World) -> list[Any]:
    """Returns every rank's `mine`, in rank order, on every rank. Needs an open process group when world.size > 1."""
    of_rank: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(of_rank, value)
    return of_rank
