"""How a global batch is shared among ranks, and the learning rate that goes with another one."""

from __future__ import annotations

import pytest

from samestep.report.figures.batch_size import advice, one_step

SETTINGS = {"global_batch": "int = 64", "lr": "float = 0.1", "data": "Path"}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((256, 4), "4 ranks × 64 = 256 samples a step"),
        ((256, 4, 8), "4 ranks × 64 = 256 samples a step, in 8 micro-batches"),
        ((64, 3), "1 × 22 + 2 × 21 on 3 ranks = 64 samples a step"),
        ((64, 1), "1 rank × 64 = 64 samples a step"),
    ],
)
def test_one_step(numbers: tuple[int, ...], text: str) -> None:
    assert one_step(*numbers) == text


def test_the_rate_that_goes_with_a_batch() -> None:
    said = advice(SETTINGS, {"global_batch": "256"})
    assert said is not None and "4 × the job's own 64" in said and "--set lr=0.4" in said


def test_adams_rate_goes_with_the_square_root_of_the_batch() -> None:
    said = advice(SETTINGS, {"global_batch": "16"}, "AdamW")
    assert said is not None and said.endswith(
        "with AdamW, scaling by the square root would take 0.1 × 0.5 (--set lr=0.05)"
    )


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
