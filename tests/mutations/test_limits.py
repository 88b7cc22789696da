"""What docs/proof.md says that the proof cannot detect is not detected: each line has its fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from messages import ids
from mutations.faults.undetected import LIMITS
from mutations.plant import References, plant
from mutations.record import DOCS
from ranks import Ranks


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with Ranks(1) as reference_rank:
        yield References(reference_rank, 2)


@pytest.mark.check
@pytest.mark.parametrize("line", LIMITS)
def test_a_fault_is_not_detected_as_the_docs_say(line: str, references: References) -> None:
    (row,) = plant(LIMITS[line], references)
    assert row["verdict"] in ("same", "approximate"), row
    if line == "Clipping that never acts":  # a note says so
        assert "clipping_never_acted" in {name for note in row["notes"] for name in ids(note)}


def test_the_docs_have_a_line_for_each() -> None:
    section = DOCS.read_text().partition("## What it cannot detect")[2]
    assert [line for line in LIMITS if f"- **{line}" not in section] == []
