"""Five ranks as threads show what fewer do not: faults of the ranks above 3; the same lines without a fault pass.

python tests/mutations/test_fifth_rank.py FILE.json    plants all of them, each with its healthy twin
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lane_marks import in_turn
from mutations.faults import Fault
from mutations.faults.fifth_rank import FAULTS, of_ranks_above
from mutations.plant import References, plant
from planting import not_applying
from ranks import SOURCE, Ranks

SIZE, LAST, NONE_ABOVE = 5, 3, 99


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with Ranks(1) as reference_rank:
        yield References(reference_rank, SIZE)


def test_every_fault_applies() -> None:
    assert not_applying(FAULTS, SOURCE / "samestep") == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 15
    assert all("LAST" in fault.new for fault in FAULTS)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=in_turn(6, number)) for number, fault in enumerate(FAULTS)],
    ids=[fault.name for fault in FAULTS],
)
def test_a_fault_of_the_fifth_rank_is_caught(fault: Fault, references: References) -> None:
    (row,) = plant(of_ranks_above(LAST, fault), references, threads=True)
    assert row["verdict"] == "differs" and row["named"], row
    (twin,) = plant(of_ranks_above(NONE_ABOVE, fault), references, threads=True)
    assert twin["verdict"] in ("same", "approximate"), twin


def main(file: Path) -> None:
    rows = []
    with Ranks(1) as reference_rank:
        references = References(reference_rank, SIZE)
        for fault in FAULTS:
            for last in (LAST, NONE_ABOVE):
                for row in plant(of_ranks_above(last, fault), references, threads=True):
                    rows.append(row | {"ranks_above": last})
                    told = (row["verdict"], row["named"], row.get("quantity"), row.get("reason"), fault.name)
                    print("fault" if last == LAST else "twin ", *told, flush=True)
    file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
