"""Faults whose cause the reference finds by replaying the training with each candidate: it is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lane_marks import in_turn
from mutations.faults.causes import FAULTS
from mutations.faults.fault import Fault
from mutations.plant import References, plant
from planting import not_applying
from ranks import SOURCE, Ranks


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with Ranks(1) as reference_rank:
        yield References(reference_rank, 2)


def test_every_fault_applies() -> None:
    assert not_applying(FAULTS, SOURCE / "samestep") == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=in_turn(6, number)) for number, fault in enumerate(FAULTS)],
    ids=[fault.name for fault in FAULTS],
)
def test_the_cause_of_a_fault_is_tried_and_named(fault: Fault, references: References) -> None:
    for row in plant(fault, references):
        assert row["verdict"] == "differs" and row["named"], row
        assert row["explained"], row
