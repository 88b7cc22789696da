"""Faults of context parallelism are caught on two replicas of two ranks, as threads; the same files without one pass.

python tests/mutations/test_context.py FILE.json    plants all of them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lane_marks import CHECK, FULL
from mutations.faults import Fault
from mutations.faults.context import CONTEXT, FAULTS, JOBS, MESH
from mutations.plant import References, plant
from ranks import SOURCE, Ranks

SIZE = 4
HEALTHY = Fault(
    "nothing", CONTEXT, "import annotations\n", "import annotations\n", (), "", JOBS, engine="context", mesh=MESH
)


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with Ranks(1) as reference_rank:
        yield References(reference_rank, SIZE)


def test_every_fault_applies() -> None:
    texts = {fault.name: (SOURCE / "samestep" / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in texts.items() if count != 1} == {}
    assert len(texts) == len(FAULTS) >= 12


@pytest.mark.check
def test_without_a_fault_it_is_the_same_step(references: References) -> None:
    assert [row["verdict"] for row in plant(HEALTHY, references, threads=True)] == ["same"]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=CHECK if number % 3 == 0 else FULL) for number, fault in enumerate(FAULTS)],
    ids=[fault.name for fault in FAULTS],
)
def test_a_fault_is_caught(fault: Fault, references: References) -> None:
    (row,) = plant(fault, references, threads=True)
    assert row["verdict"] in ("differs", "failed") and row.get("quantity", row["verdict"]) in fault.named, row


def main(file: Path) -> None:
    with Ranks(1) as reference_rank:
        references = References(reference_rank, SIZE)
        rows = []
        for fault in (HEALTHY, *FAULTS):
            rows += plant(fault, references, threads=True)
            told = rows[-1]
            print(told["verdict"], told["named"], told.get("quantity"), told.get("reason"), told["fault"], flush=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
