"""A public script, how it is run on small data, and the faults that are planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """`new` for `old`, which stands once in a file; by default in the script."""

    old: str
    new: str
    file: str = ""


@dataclass(frozen=True)
class Plant:
    """A fault. edits: what it changes. question: whose answer is 'differs' first; cause: its id."""

    name: str
    edits: tuple[Edit, ...]
    question: str
    cause: str


def plant(name: str, old: str, new: str, question: str, cause: str, file: str = "") -> Plant:
    return Plant(name, (Edit(old, new, file),), question, cause)


@dataclass(frozen=True)
class Case:
    """A script of a public repository.

    repo: OWNER/NAME on GitHub, at a commit. folder: what is taken of it; the script runs in `cwd` of that. before:
    modules of standins/ that are imported before the script; packages: stand-ins for packages that it imports.
    prepare: makes its data. answer: what is right to say of the script as it is; why: words of the first divergence's
    cause, or of an unknown. edits: what else the script needs for a training that can be judged; the faults are planted
    in that, and it is checked as well.
    """

    name: str
    repo: str
    commit: str
    script: str
    arguments: tuple[str, ...] = ()
    cwd: str = ""
    folder: str = ""
    before: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    prepare: Callable[[Path], object] | None = None
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    answer: str = "right"
    why: str = ""
    edits: tuple[Edit, ...] = ()
    note: str = ""
    plants: tuple[Plant, ...] = ()
