"""The changes of changes.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Edits = tuple[tuple[str, str, str], ...]  # file, old text, new text
Moves = tuple[tuple[str, str], ...]  # old path, new path


@dataclass(frozen=True)
class Planted:
    """A change of the training. questions: one of which names it. line: a text of the changed lines that are told
    first. step: at which it differs; None: before the first. arguments: of the script."""

    name: str
    edits: Edits
    questions: tuple[str, ...]
    line: str
    step: int | None
    arguments: str


@dataclass(frozen=True)
class Refactored:
    """A change that leaves the training as it is."""

    name: str
    edits: Edits
    moves: Moves
    arguments: str


def edits_of(rows: list[dict[str, str]]) -> Edits:
    return tuple((row.get("file", ""), row["old"], row["new"]) for row in rows)


def _planted(row: dict[str, Any]) -> Planted:
    return Planted(
        row["name"],
        edits_of(row["edits"]),
        tuple(row["questions"]),
        row["line"],
        step=row.get("step"),
        arguments=row.get("arguments", ""),
    )


def _refactored(row: dict[str, Any]) -> Refactored:
    moves = tuple((old, new) for old, new in row.get("moves", []))
    return Refactored(row["name"], edits_of(row.get("edits", [])), moves=moves, arguments=row.get("arguments", ""))


_read = tomllib.loads((Path(__file__).parent / "changes.toml").read_text(encoding="utf-8"))
NOISE = edits_of(_read["noise"])  # changes nothing, beside each planted change
PLANTED = tuple(map(_planted, _read["planted"]))
REFACTORED = tuple(map(_refactored, _read["refactored"]))
