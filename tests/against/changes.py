"""Changes of scripts, as files of TOML have them, and those of changes.toml."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planting import Edit, Everywhere

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

# Of a public repository's history; changes of the training; those that leave it as it is.
KINDS = ("history", "planted", "refactored")


@dataclass(frozen=True)
class Change:
    """A change of a script.

    questions: one of which names it; none where it leaves the training as it is. line: a text of the changed lines that
    are told first. step: at which it differs; None: before the first. moves: old and new path. arguments: of the
    script; none: those that it has anyway.

    Of public scripts alone: script: its name in public_cases; commits: before and after a change of the repository's
    history; packages: that the script had before; its ranks then are no children of the fork server. steps: compared.
    """

    kind: str
    name: str
    questions: Sequence[str] = ()
    edits: Sequence[Edit] = ()
    moves: Sequence[tuple[str, str]] = ()
    arguments: str = ""
    line: str = ""
    step: int | None = None
    script: str = ""
    commits: Sequence[str] = ()
    packages: Sequence[str] = ()
    steps: int = 4


def edit_of(row: dict[str, str]) -> Edit:
    """Returns the edit of a table of TOML."""
    kind = Everywhere if "everywhere" in row else Edit
    return kind(row.get("everywhere") or row["old"], row["new"], row.get("file", ""))


def changes_of(name: str) -> list[Change]:
    """Returns the changes of a file beside this one, whose keys are names of fields. Planted ones have its noise."""
    rows = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    changes = []
    for kind in KINDS:
        noise = rows.get("noise", []) if kind == "planted" else []
        for row in rows.get(kind, []):
            edits = [edit_of(each) for each in [*noise, *row.get("edits", [])]]
            changes.append(Change(kind, **row | {"edits": edits}))
    return changes


CHANGES = changes_of("changes.toml")
