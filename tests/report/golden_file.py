"""Golden files: what the report says of the results of example_results.py, in English and in Chinese.

UPDATE_GOLDEN=1 pytest tests/report writes them anew: read the difference before you commit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "UPDATE_GOLDEN"  # in the environment: writes the golden files anew


def agrees(name: str, lines: Sequence[str]) -> None:
    """Asserts that these lines are those of a golden file."""
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get(UPDATE):
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert golden.read_text(encoding="utf-8").splitlines() == [*lines]


def parts(texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the lines of several texts, each under its name."""
    return [line for name, text in texts.items() for line in (name, *(f"    {line}" for line in text), "")][:-1]
