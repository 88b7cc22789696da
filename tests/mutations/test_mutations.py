"""The proof rejects every planted fault and names it; and it passes the same files without a fault."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lane_marks import CHECK, FULL
from mutations.faults import ALL, FAULTS, Fault, causes
from mutations.plant import References, patched, plant, sizes_of
from mutations.record import DOCS, with_table
from planting import FileFault, not_applying
from ranks import ELSEWHERE, SOURCE, Ranks, engine_facts

SIZES = (2, 3)
QUICK = {"gradient summed, not averaged", "shuffle not changing by epoch"}  # planted without `make check`, too
OFTEN = {  # one each of the schedule, the loader and the evaluation
    "scheduler stepped N times",
    "last batch averaged per rank",
    "padded evaluation",
    "augmentation alike in every epoch",
}
PLANTED = [(fault, size) for fault in FAULTS for size in sizes_of(fault, SIZES)]


def lane_of(fault: Fault, size: int) -> tuple[pytest.MarkDecorator, ...]:
    """Every eighth fault at 2 or at 3 ranks, in turn; `make full` plants all, and record.py all through the command."""
    number = FAULTS.index(fault)
    if fault.name in QUICK and size == 2:
        return ()
    if fault.name in OFTEN and size == 2:
        return (CHECK,)
    return (CHECK if size == 1 or (number % 8 == 0 and size == SIZES[number // 8 % 2]) else FULL,)


NOTHING = Fault("nothing", "engines/ddp.py", "import torch\n", "import torch\n", named=(), cause="")


@pytest.fixture(scope="module")
def references() -> Iterator[Mapping[int, References]]:
    """References of each number of ranks: each is played once, for all faults."""
    with Ranks(1) as reference_rank:
        yield {size: References(reference_rank, size) for size in (1, *SIZES)}


def test_there_are_enough_faults() -> None:
    assert {fault.name for fault in FAULTS} >= QUICK | OFTEN
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 14
    assert {job for fault in FAULTS for job in fault.jobs} == {
        *ALL,
        *("sentences", "stream", "averaged", "masked", "arrays", "one_by_one", "windows"),
    }
    assert all(fault.needs for fault in FAULTS if fault.jobs != ALL)
    assert all(f"engines/{fault.engine}.py" == fault.file for fault in FAULTS if fault.engine != "ddp")


def test_the_docs_tell_what_the_record_holds_of_every_fault() -> None:
    rows = json.loads(max((SOURCE.parent / "results").glob("mutations_[0-9]*/rows.json")).read_text())
    recorded = {row["fault"] for row in rows}
    assert recorded <= {fault.name for fault in (*FAULTS, *causes.FAULTS)}
    assert DOCS.read_text() == with_table(DOCS.read_text(), rows)
    for readme in ("README.md", "README.zh.md"):
        counts = re.findall(r"\d+", (SOURCE.parent / readme).read_text().partition("results/mutations")[0][-300:])
        assert {str(len(recorded)), str(len(rows))} <= {*counts}, readme


def test_every_fault_applies() -> None:
    """In a moment, where planting them takes minutes."""
    assert not_applying(FAULTS, SOURCE / "samestep") == []


def test_without_a_fault_the_copy_is_the_same_training(references: Mapping[int, References]) -> None:
    assert [row["verdict"] for row in plant(NOTHING, references[2])] == ["same"] * len(ALL)


@pytest.mark.parametrize(
    ("fault", "size"),
    [pytest.param(*planted, marks=lane_of(*planted)) for planted in PLANTED],
    ids=[f"{fault.name}, {size} ranks" for fault, size in PLANTED],
)
def test_a_fault_is_caught_named_and_explained(fault: Fault, size: int, references: Mapping[int, References]) -> None:
    facts = engine_facts(fault.engine, size)
    if not facts.available and ("CI" not in os.environ or fault.engine in ELSEWHERE):
        pytest.skip(f"{facts.reason}: {facts.install}")
    # On one of its jobs, each in turn; `make mutations` plants it on all.
    in_turn = fault.jobs[(FAULTS.index(fault) // 2 + size) % len(fault.jobs)]
    for row in plant(fault, references[size], (in_turn,)):
        assert row["verdict"] == "differs", row
        assert row["named"], row
        # None: what the fault does is no candidate of the causes that are tried.
        assert row["explained"] is (True if fault.cause else None), row


def test_a_patch_that_does_not_apply_fails(tmp_path: Path) -> None:
    absent = FileFault("absent", "engines/ddp.py", "no such line", "")
    with pytest.raises(ValueError, match=r"'absent'.* 0 times"):
        patched(absent, tmp_path)
