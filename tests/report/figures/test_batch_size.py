"""How a global batch is shared among ranks, and the learning rate that goes with another one."""

from __future__ import annotations

import pytest

from said import says
from samestep.message import message
from samestep.report.figures.batch_size import advice, one_step

SETTINGS = {"global_batch": "int = 64", "lr": "float = 0.1", "data": "Path"}


@pytest.mark.parametrize(
    ("numbers", "micro_batches", "shares"),
    [
        ((256, 4), None, {"ranks": 4, "share": 64}),
        ((256, 4, 8), 8, {"ranks": 4, "share": 64}),
        ((64, 3), None, {"ranks": 3, "more": 1, "larger": 22, "fewer": 2, "share": 21}),
        ((64, 1), None, {"ranks": 1, "share": 64}),
    ],
)
def test_one_step(numbers: tuple[int, ...], micro_batches: int | None, shares: dict[str, int]) -> None:
    said = one_step(*numbers)
    says(said, "rows_of_a_step", rows=numbers[0], micro_batches=micro_batches)
    says(said.fields["shares"], "ranks_share_unevenly" if "more" in shares else "ranks_share_evenly", **shares)


def test_the_rate_that_goes_with_a_batch() -> None:
    said = advice(SETTINGS, {"global_batch": "256"})
    warm_up = message("after_some_epochs_of_warm_up")
    says(said, "learning_rate_by_linear_scaling", factor=4, default=64, rate=0.1, scaled=0.4, warm_up=warm_up)


def test_adams_rate_goes_with_the_square_root_of_the_batch() -> None:
    said = advice(SETTINGS, {"global_batch": "16"}, "AdamW")
    fields = {"factor": 0.25, "default": 64, "rate": 0.1, "root": 0.5, "scaled": 0.05, "warm_up": None}
    says(said, "learning_rate_by_square_root", optimizer="AdamW", **fields)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (SETTINGS, {"lr": "0.2"}),
        (SETTINGS, {"global_batch": "256", "lr": "0.4"}),
        (SETTINGS, {"global_batch": "64"}),
        ({"global_batch": "int = 64"}, {"global_batch": "256"}),
        ({"global_batch": "int", "lr": "float = 0.1"}, {"global_batch": "256"}),
    ],
)
def test_nothing_to_say(settings: dict[str, str], chosen: dict[str, str]) -> None:
    assert advice(settings, chosen) is None
