"""Orders of the job's own: Weighted, ByLength, Lanes, a function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from conformance.jobs_job import ordered
from samestep import ByLength, Job, Lanes, UserError, Weighted
from samestep.data.schedule import check_epochs, schedule_of


def test_rows_are_drawn_by_their_weights() -> None:
    job = replace(ordered(), order=Weighted([0.0, 1.0, 3.0] + [0.0] * 41, num_samples=40_000))
    schedule = schedule_of(job, 1)
    counts = np.bincount(schedule.order(0), minlength=44)
    assert schedule.steps_per_epoch == 2_500 and counts.sum() == counts[1] + counts[2] == 40_000
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.1)
    assert not np.array_equal(schedule.order(0), schedule.order(1))


def test_rows_that_come_again_are_counted() -> None:
    schedule = schedule_of(ordered("function"), 2)
    seen: dict[int, int] = {}
    steps = [[schedule.step(rank, 0, number)[0] for rank in (0, 1)] for number in range(schedule.steps_per_epoch)]
    for part in (part for ranks in steps for part in ranks):
        assert part.repeats is not None
        for row, repeat in zip(part.indices.tolist(), part.repeats.tolist(), strict=True):
            assert repeat == seen.get(row, 0)
            seen[row] = repeat + 1
    assert max(seen.values()) > 2


def test_batches_have_rows_of_like_lengths() -> None:
    lengths = [int(x) for x in torch.randint(1, 1000, (1037,), generator=torch.Generator().manual_seed(0))]
    data = torch.utils.data.TensorDataset(torch.zeros(1037, 6), torch.zeros(1037).long())
    job = replace(ordered(), train=data, order=None)
    padding = {}
    for name, order in (("usual", None), ("like", ByLength(lengths, buckets=20))):
        by_batch = np.split(schedule_of(replace(job, order=order), 1).order(0), range(16, 1037, 16))
        assert sorted(np.concatenate(by_batch).tolist()) == [*range(1037)]
        padding[name] = sum(max(lengths[i] for i in batch) * len(batch) for batch in by_batch) - sum(lengths)
    assert padding["like"] < 0.12 * padding["usual"]


def test_lanes_are_contiguous() -> None:
    schedule = schedule_of(replace(ordered(), order=Lanes(), global_batch=10), 1)
    rows = schedule.order(0)
    assert rows[:40].reshape(4, 10).T.tolist() == np.arange(40).reshape(10, 4).tolist()
    assert rows[40:].tolist() == [40, 41, 42, 43] and np.array_equal(rows, schedule.order(1))


WRONG: dict[str, Callable[[], Job]] = {
    "Weighted has 2 weights, and the dataset 44 samples": lambda: replace(ordered(), order=Weighted([1.0, 2.0])),
    "the weights must be 0 or above": lambda: replace(ordered(), order=Weighted([-1.0] * 44)),
    "ByLength has 1 lengths, and the dataset 44": lambda: replace(ordered(), order=ByLength([1.0])),
    "order is a list; give Weighted, ByLength, Lanes": lambda: replace(ordered(), order=[0, 1]),
    "order and shuffle=False": lambda: replace(ordered(), shuffle=False),
}


@pytest.mark.parametrize("says", WRONG)
def test_orders_that_cannot_be_are_refused(says: str) -> None:
    with pytest.raises(UserError, match=says):
        WRONG[says]()


def test_a_function_that_gives_other_rows_is_refused() -> None:
    for order, says in (
        (lambda epoch, generator: [0, 44], "are not all of 0 to 43"),
        (lambda epoch, generator: range(5 + epoch), "gave 5 indices for epoch 0, and 6 for epoch 1"),
    ):
        with pytest.raises(UserError, match=says):
            schedule_of(replace(ordered(), order=order), 1).step(0, 1, 0)


@pytest.mark.parametrize(
    ("from_epoch", "epochs", "is_found"), [(1, 3, True), (7, 100, True), (99, 100, True), (3, 3, False)]
)
def test_an_order_of_another_length_is_refused_before_the_training(
    from_epoch: int, epochs: int, is_found: bool
) -> None:
    job = replace(ordered(), order=lambda epoch, generator: range(20 + (epoch >= from_epoch)), epochs=epochs)
    with pytest.raises(UserError, match="gave 20 indices for epoch 0, and 21") if is_found else nullcontext():
        check_epochs(job)
