"""The loader hands over what the schedule names, whatever the dataset, the workers and the order of fetching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import Subset, default_collate

from conformance import jobs_drawn
from samestep.data.loader import batches
from samestep.inspection import schedule_of
from samestep.job import Job
from samestep.world import World


def _all(job: Job, rank: int = 0, size: int = 2) -> list[object]:
    world = World(rank=rank, size=size)
    return list(batches(job, world, schedule_of(job, size), 9))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ways_of_fetching_give_the_same_tensors(workers: int, rank: int) -> None:
    job = jobs_drawn.job(rows=29)
    by_rows = replace(job, train=Subset(job.train, range(29)), collate=default_collate)
    for ours, theirs in zip(_all(job, rank), _all(replace(by_rows, workers=workers), rank), strict=True):
        assert (ours.part.indices == theirs.part.indices).all()
        assert all(torch.equal(a, b) for a, b in zip(ours.data, theirs.data, strict=True))
        assert torch.equal(ours.data[0], torch.stack([job.train[i][0] for i in ours.part.indices]))


def test_augmentation_depends_on_neither_ranks_nor_workers() -> None:
    def augment(sample: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (sample[0] + torch.rand((), generator=generator), *sample[1:])

    job = replace(jobs_drawn.job(rows=16), augment=augment)

    def seen(size: int, workers: int) -> dict[tuple[int, int], float]:
        loaded = [batch for rank in range(size) for batch in _all(replace(job, workers=workers), rank, size)]
        return {
            (batch.part.epoch, int(index)): float(row.sum())
            for batch in loaded
            for index, row in zip(batch.part.indices[: batch.part.rows], batch.data[0])
        }

    alone = seen(1, 0)
    assert alone == seen(3, 0) == seen(2, 2)
    assert alone[0, 3] != alone[1, 3]  # and another epoch is another draw


def test_starting_a_loader_draws_nothing_from_the_trainings_stream() -> None:
    before = torch.get_rng_state()
    _all(jobs_drawn.job(rows=29))
    assert torch.equal(before, torch.get_rng_state())
