"""The loader hands over what the schedule names, whatever the dataset, the workers and the order of fetching."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from conformance import jobs_drawn
from said import refuses
from samestep.data.loader import Rows, batches
from samestep.data.pipeline import Span
from samestep.data.stream import is_stream, nested
from samestep.data.workers import fetched
from samestep.errors import LoadingFailed
from samestep.job import Job, MicroBatch
from samestep.tasks.inspect.job import schedule_of
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
        assert (ours.micro_batch.indices == theirs.micro_batch.indices).all()
        assert all(torch.equal(a, b) for a, b in zip(ours.data, theirs.data, strict=True))
        assert torch.equal(ours.data[0], torch.stack([job.train[i][0] for i in ours.micro_batch.indices]))


def test_augmentation_depends_on_neither_ranks_nor_workers() -> None:
    def augment(sample: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (sample[0] + torch.rand((), generator=generator), *sample[1:])

    job = replace(jobs_drawn.job(rows=16), augment=augment)

    def seen(size: int, workers: int) -> dict[tuple[int, int], float]:
        loaded = [batch for rank in range(size) for batch in _all(replace(job, workers=workers), rank, size)]
        return {
            (batch.micro_batch.epoch, int(index)): float(row.sum())
            for batch in loaded
            for index, row in zip(batch.micro_batch.indices[: batch.micro_batch.rows], batch.data[0])
        }

    alone = seen(1, 0)
    assert alone == seen(3, 0) == seen(2, 2)
    assert alone[0, 3] != alone[1, 3]  # and another epoch is another draw


def test_starting_a_loader_draws_nothing_from_the_trainings_stream() -> None:
    before = torch.get_rng_state()
    _all(jobs_drawn.job(rows=29))
    assert torch.equal(before, torch.get_rng_state())


def test_a_tensor_dataset_is_indexed_here_whatever_the_workers() -> None:
    before = set(psutil.Process().children(recursive=True))
    loaded = batches(replace(jobs_drawn.job(rows=29), workers=2), World(), schedule_of(jobs_drawn.job(rows=29), 1), 9)
    assert next(loaded).fetch_s is None  # by the training itself
    assert set(psutil.Process().children(recursive=True)) == before


def test_workers_tell_how_long_they_took_and_the_trace_shows_who_did_what() -> None:
    class Slow(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.001)
            return super().__getitem__(index)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    job = replace(jobs_drawn.job(rows=29), workers=2, prefetch=3)
    job = replace(job, train=Slow(job.train, range(29)))
    trace: list[Span] = []
    seen = list(batches(job, World(), schedule_of(job, 1), 9, trace=trace))
    assert all(batch.fetch_s and batch.fetch_s >= 0.001 * len(batch.micro_batch.indices) for batch in seen)
    assert [span.item for span in trace if span.stage == "train"] == list(range(9))
    assert {span.stage for span in trace} == {"sample", "train"}  # nothing is gathered on a CPU


class ByBatch(Dataset[Any]):
    """Gives samples by the batch alone, and `more` too many."""

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> Any:
        return [torch.tensor(float(index)) for index in [*indices, *indices[: self.more]]]


def test_samples_are_fetched_by_the_batch_and_must_be_as_many() -> None:
    job = replace(jobs_drawn.job(), train=ByBatch(), collate=default_collate, augment=None)
    first = next(batches(job, World(), schedule_of(job, 1), 1))
    assert first.data.tolist() == first.micro_batch.indices.tolist()
    with refuses("batch_of_samples_has_another_length", dataset="ByBatch", samples=10, indices=8):
        list(batches(replace(job, train=ByBatch(2)), World(), schedule_of(job, 1), 1))


def test_an_error_of_augment_names_its_sample() -> None:
    def augment(sample: Any, generator: torch.Generator) -> Any:
        if sample == 5:
            raise ValueError("no such colour")
        return sample

    job = replace(jobs_drawn.job(), train=ByBatch(), collate=default_collate, augment=augment)
    failed = {"place": "sample 5", "error": "ValueError: no such colour"}
    with refuses("rows_not_loaded", LoadingFailed, **failed):
        list(batches(job, World(), schedule_of(job, 1), 1))


def test_prefetch_is_how_far_workers_read_ahead() -> None:
    job = jobs_drawn.job(rows=64)
    rows = Rows(replace(job, train=Subset(job.train, range(64)), collate=default_collate))

    def asked_for(prefetch: int) -> int:
        seen = []

        def parts() -> Iterator[MicroBatch]:
            for part in schedule_of(job, 1).micro_batches_of(0, 8):
                seen.append(part)
                yield part

        found = fetched(rows, parts(), 1, prefetch)
        next(found)
        found.close()
        return len(seen)

    assert asked_for(5) - asked_for(2) == 3


def test_a_dataset_that_names_itself_has_an_end() -> None:
    dataset: Any = Subset(range(4), range(4))  # type: ignore[arg-type]
    dataset.dataset = dataset
    assert list(nested(dataset)) == [dataset] and not is_stream(dataset)
