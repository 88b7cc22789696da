"""Step times, waits and losses; a loss that is not finite is named with its true step."""

from __future__ import annotations

import time

import pytest
import torch

from said import refuses, says
from samestep.errors import UserError
from samestep.rank.meter import HALF, Meter


@pytest.mark.parametrize("count", [1, HALF - 1, HALF, HALF + 1, 3 * HALF, 101])
def test_losses_come_whole_and_in_order(count: int) -> None:
    meter = Meter(0, "cpu")
    meter.begin()
    for step in range(count):
        meter.loss(torch.tensor(step + 0.1, dtype=torch.float64), step, 1.0)
        meter.step()
    assert len(meter.finish()) == count
    assert meter.losses == [step + 0.1 for step in range(count)]


@pytest.mark.parametrize("count", [1, HALF - 1, HALF, 2 * HALF + 1])
def test_there_is_a_recent_loss_from_the_first_step_on(count: int) -> None:
    meter = Meter(0, "cpu")
    for step in range(count):
        meter.loss(torch.tensor(step + 0.5, dtype=torch.float64), step, 1.0)
    assert meter.recent_loss() == count - 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 5, 37, 63])
def test_a_loss_that_is_not_finite_is_noticed_a_few_steps_late(bad: float, at: int) -> None:
    meter = Meter(1, "cpu")
    noticed = None
    for step in range(64):
        try:
            meter.loss(torch.tensor(bad if step == at else 1.0), step, 1.0)
        except UserError as error:
            noticed = step
            says(error.message, "loss_not_finite_at_step", step=at, rank=1)
            break
    if noticed is None:
        with refuses("loss_not_finite_at_step", step=at, rank=1):
            meter.finish()
    else:
        assert at < noticed <= at + 2 * HALF


def test_waiting_is_told_apart_and_part_of_the_step() -> None:
    meter = Meter(0, "cpu")
    meter.begin()
    for _ in range(3):
        time.sleep(0.02)
        meter.waited(0.02)
        meter.step()
    assert meter.wait_s == [0.02] * 3
    assert all(step >= 0.02 for step in meter.finish())


def test_fetching_beside_the_training_and_in_it_are_added_up_apart_from_waiting() -> None:
    meter = Meter(0, "cpu")
    meter.begin()
    meter.waited(0.5, 2.0)  # a worker took 2 s, of which the training noticed half a second
    meter.waited(0.25)  # it fetched by itself
    meter.step()
    assert (meter.wait_s, meter.fetch_s) == ([0.75], 2.25)


def test_the_thread_is_busy_while_it_computes_and_not_while_it_waits_or_loads() -> None:
    meter = Meter(rank=0, device="cpu")

    def work(seconds: float) -> float:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass
        return time.thread_time() - began

    meter.begin()
    loading = work(0.05)
    meter.waited(0.05, None, loading)  # in this thread
    first = work(0.1)
    time.sleep(0.1)  # as in a collective
    meter.step()
    evaluation = work(0.1)
    meter.resume()
    second = work(0.03)
    meter.step()
    assert first - 1e-6 < meter.busy_s[0] < first + loading
    assert second - 1e-6 < meter.busy_s[1] < second + evaluation
