"""The schedule: the same global batches on any number of ranks, every sample once, and the reference's own agrees."""

from __future__ import annotations

from collections import Counter
from math import ceil, isclose
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.schedule import Schedule, cut
from samestep.engine import Layout
from samestep.job import Job, Recipe
from samestep.reference.schedule import step_rows

schedules = st.builds(
    Schedule,
    length=st.integers(1, 200),
    global_batch=st.integers(1, 40),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    micro_batch=st.one_of(st.none(), st.integers(1, 9)),
)


def _epoch(schedule: Schedule, epoch: int) -> list[list[list[int]]]:
    """[step][rank] -> the indices that count."""
    return [
        [
            [int(i) for part in schedule.step(rank, epoch, step) for i in part.indices[: part.rows]]
            for rank in range(schedule.world_size)
        ]
        for step in range(schedule.steps_per_epoch)
    ]


@settings(deadline=None)  # a busy machine may stop a test for longer than the 200 ms that are the default
@given(schedules, st.integers(0, 3))
def test_every_sample_once_an_epoch(schedule: Schedule, epoch: int) -> None:
    seen = Counter(i for step in _epoch(schedule, epoch) for rank in step for i in rank)
    assert seen == Counter(range(schedule.length))


@settings(deadline=None)
@given(schedules, st.integers(1, 9))
def test_a_global_batch_is_the_same_for_every_world_size(schedule: Schedule, other: int) -> None:
    from dataclasses import replace

    alike = replace(schedule, world_size=other)
    whole = [[i for rank in step for i in rank] for step in _epoch(schedule, 1)]
    assert whole == [[i for rank in step for i in rank] for step in _epoch(alike, 1)]


@settings(deadline=None)
@given(schedules)
def test_shares_make_the_ranks_average_exact(schedule: Schedule) -> None:
    for step in range(schedule.steps_per_epoch):
        parts = [part for rank in range(schedule.world_size) for part in schedule.step(rank, 0, step)]
        assert isclose(sum(part.share for part in parts), schedule.world_size)
        assert all((part.share == 0) == (part.rows == 0) for part in parts)


@settings(deadline=None)
@given(schedules)
def test_every_rank_has_as_many_micro_batches_and_rank_0_always_has_rows(schedule: Schedule) -> None:
    for step in range(schedule.steps_per_epoch):
        of_ranks = [schedule.step(rank, 0, step) for rank in range(schedule.world_size)]
        assert {len(parts) for parts in of_ranks} == {schedule.micro_batches}
        assert of_ranks[0][0].rows > 0
        assert all(len(part.indices) > 0 for parts in of_ranks for part in parts)
        if schedule.micro_batch:
            assert all(part.rows <= schedule.micro_batch for parts in of_ranks for part in parts)


@settings(deadline=None)
@given(schedules)
def test_the_order_changes_with_the_epoch_and_the_seed(schedule: Schedule) -> None:
    from dataclasses import replace

    if schedule.length > 20:
        assert not np.array_equal(schedule.order(0), schedule.order(1))
        assert not np.array_equal(schedule.order(0), replace(schedule, seed=schedule.seed + 1).order(0))


@settings(deadline=None)
@given(schedules)
def test_the_references_own_schedule_agrees(schedule: Schedule) -> None:
    """Two ways of writing the same definition. If both were one, a fault in it would be invisible."""
    job = Job(
        model=torch.nn.Identity,
        criterion=lambda output, batch: output.mean(),
        optimizer=Recipe(torch.optim.SGD),
        train=range(schedule.length),  # type: ignore[arg-type]
        global_batch=schedule.global_batch,
        seed=schedule.seed,
        micro_batch=schedule.micro_batch,
    )
    layout = Layout(replicas=schedule.world_size)
    for number in range(schedule.steps_per_epoch * 2):
        plan = step_rows(job, layout, number)
        for rank in range(schedule.world_size):
            ours = schedule.step(rank, *divmod(number, schedule.steps_per_epoch))
            assert [part.indices[: part.rows].tolist() for part in ours] == [micro[rank] for micro in plan]


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("replicas", range(1, 6))
def test_dataparallels_chunks_are_torchs(rows: int, replicas: int) -> None:
    """5 rows over 4 devices: 2, 2, 1, and a device without."""
    job = Job(
        model=torch.nn.Identity,
        criterion=lambda output, batch: output.mean(),
        optimizer=Recipe(torch.optim.SGD),
        train=range(rows),  # type: ignore[arg-type]
        global_batch=rows,
    )
    ((*chunks,),) = step_rows(job, Layout(replicas=replicas, split="chunk"), 0)
    theirs = [chunk.tolist() for chunk in torch.arange(rows).chunk(replicas)]
    assert [len(chunk) for chunk in chunks if chunk] == [len(chunk) for chunk in theirs]
    assert len(chunks) == replicas


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 20))
def test_cut(rows: int, parts: int) -> None:
    sizes = cut(rows, parts)
    assert sum(sizes) == rows
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(schedules)
def test_the_smallest_part_is_the_smallest(schedule: Schedule) -> None:
    sizes = [
        (part.rows, step, rank)
        for step in range(schedule.steps_per_epoch)
        for rank in range(schedule.world_size)
        for part in schedule.step(rank, 0, step)
        if part.rows
    ]
    assert schedule.smallest_micro_batch() == min(sizes)


def test_last_drop_leaves_whole_batches() -> None:
    schedule = Schedule(length=29, global_batch=8, last="drop")
    assert schedule.steps_per_epoch == 3
    assert Schedule(length=29, global_batch=8).steps_per_epoch == ceil(29 / 8)


@pytest.mark.parametrize(
    ("length", "last", "completes"),
    [(24, "keep", [2, 5]), (25, "keep", [3, 7]), (24, "drop", [2, 5]), (25, "drop", [2, 5])],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_last_micro_batch_of_an_epoch_completes_it(
    length: int, last: Literal["keep", "drop"], completes: list[int], world_size: int
) -> None:
    """On every rank, one without rows too: there the scheduler steps."""
    schedule = Schedule(length, global_batch=8, world_size=world_size, micro_batch=2, last=last)
    for rank in range(world_size):
        parts = list(schedule.micro_batches_of(rank, 2 * schedule.steps_per_epoch))
        assert [(part.step, part.micro) for part in parts if part.completes_epoch] == [
            (step, schedule.micro_batches - 1) for step in completes
        ]


@settings(deadline=None)
@given(schedules, st.integers(0, 50), st.sampled_from(["keep", "drop"]))
def test_rows_are_counted_as_they_are_shared_out(schedule: Schedule, steps: int, last: str) -> None:
    from dataclasses import replace

    schedule = replace(schedule, last=last)  # type: ignore[arg-type]
    if schedule.steps_per_epoch:
        counted = sum(p.rows for r in range(schedule.world_size) for p in schedule.micro_batches_of(r, steps))
        assert schedule.rows_of(steps) == counted
