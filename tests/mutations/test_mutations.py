"""The proof rejects every planted fault and names it; and it passes the same files without a fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mutations.faults import ALL, FAULTS, Fault
from mutations.plant import patched, planted, references
from ranks import Ranks
from samestep.record import Record

SIZES = (2, 3)
NOTHING = Fault("nothing", "engines/ddp.py", "import torch\n", "import torch\n", named=(), cause="")


@pytest.fixture(scope="module", params=SIZES)
def expected(request: pytest.FixtureRequest) -> Iterator[tuple[int, dict[str, Record]]]:
    with Ranks(1) as judge_rank:
        yield request.param, references(judge_rank, request.param)


def test_there_are_enough_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 14
    assert {job for fault in FAULTS for job in fault.jobs} == set(ALL)
    assert all(fault.needs for fault in FAULTS if fault.jobs != ALL)


def test_without_a_fault_the_copy_is_the_same_training(expected: tuple[int, dict[str, Record]]) -> None:
    size, reference = expected
    assert [row["verdict"] for row in planted(NOTHING, size, reference)] == ["same"] * len(ALL)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_named_and_explained(fault: Fault, expected: tuple[int, dict[str, Record]]) -> None:
    size, reference = expected
    for row in planted(fault, size, reference):
        assert row["verdict"] == "differs", row
        assert row["named"], row
        assert row["explained"], row


def test_a_patch_that_does_not_apply_fails(tmp_path: Path) -> None:
    absent = Fault("absent", "engines/ddp.py", "no such line", "", named=(), cause="")
    with pytest.raises(ValueError, match="'absent' does not apply: its text stands 0 times"):
        patched(absent, tmp_path)
