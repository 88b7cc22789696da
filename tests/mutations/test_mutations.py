"""The proof rejects every planted fault and names it; and it passes the same files without a fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutations.faults import ALL, FAULTS, Fault
from mutations.plant import References, patched, planted
from ranks import SOURCE, Ranks, engine_facts

SIZES = (2, 3)
NOTHING = Fault("nothing", "engines/ddp.py", "import torch\n", "import torch\n", named=(), cause="")
# Other engines than ddp are slow to start, and what they do alike is planted in ddp: 2 ranks.
AT = [(size, fault) for size in SIZES for fault in FAULTS if size == 2 or fault.engine == "ddp"]


@pytest.fixture(scope="module")
def references() -> Iterator[dict[int, References]]:
    """By the number of ranks; each reference is played once for all faults."""
    with Ranks(1) as judge_rank:
        yield {size: References(judge_rank, size) for size in SIZES}


def test_there_are_enough_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 14
    assert {job for fault in FAULTS for job in fault.jobs} == {*ALL, "sentences", "stream"}
    assert all(fault.needs for fault in FAULTS if fault.jobs != ALL)
    assert all(f"engines/{fault.engine}.py" == fault.file for fault in FAULTS if fault.engine != "ddp")


def test_every_fault_applies() -> None:
    """In a moment, where planting them takes minutes."""
    texts = {fault.name: (SOURCE / "samestep" / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in texts.items() if count != 1} == {}


@pytest.mark.parametrize("size", SIZES)
def test_without_a_fault_the_copy_is_the_same_training(size: int, references: dict[int, References]) -> None:
    assert [row["verdict"] for row in planted(NOTHING, references[size])] == ["same"] * len(ALL)


@pytest.mark.parametrize(("size", "fault"), AT, ids=lambda x: getattr(x, "name", str(x)))
def test_a_fault_is_caught_named_and_explained(size: int, fault: Fault, references: dict[int, References]) -> None:
    facts = engine_facts(fault.engine, size)
    if not facts["available"] and "CI" not in os.environ:
        pytest.skip(f"{facts['reason']}: {facts['install']}")
    for row in planted(fault, references[size]):
        assert row["verdict"] == "differs", row
        assert row["named"], row
        assert row["explained"], row


def test_a_patch_that_does_not_apply_fails(tmp_path: Path) -> None:
    absent = Fault("absent", "engines/ddp.py", "no such line", "", named=(), cause="")
    with pytest.raises(ValueError, match="'absent' does not apply: its text stands 0 times"):
        patched(absent, tmp_path)
