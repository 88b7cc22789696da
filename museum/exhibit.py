"""Exhibit: what museum/NAME/exhibit.toml says of one published bug."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
PINS = HERE / ".pins"


@dataclass(frozen=True)
class Exhibit:
    """A published bug that runs here.

    kind: its class. source: where it was published. versions: in which it is wrong, and since when right.
    code: 'library', where the library's own code runs, or 'pattern', where the mistake is written in plain torch.
    command: 'check' runs the scripts wrong.py and right.py; 'verify' proves job.py under engines of these names; 'diff'
    compares the check of a script with that of the script resumed from what the first has saved.
    arguments: more words of the command; of 'diff', of both checks. resumed: words of the resumed script. resumed_at:
    steps before its checkpoint. question, cause: what must be named: the question (of a proof, the quantity)
    that differs first, and words of its cause. why: why it is not caught, or not named, where that is so.
    pins: packages of the wrong and of the right version, for museum/install.py; both then run train.py.
    needs: modules without which it does not run.
    """

    name: str
    title: str
    kind: str
    source: str
    versions: str
    code: Literal["library", "pattern"]
    command: Literal["check", "verify", "diff"]
    question: str
    cause: str
    arguments: list[str] = field(default_factory=list)
    why: str = ""
    pins: dict[str, list[str]] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    nproc: int = 2
    resumed: list[str] = field(default_factory=list)
    resumed_at: int = 0

    @property
    def folder(self) -> Path:
        return HERE / self.name

    def file(self, version: str) -> Path:
        """Returns the script, or the engine, of version 'wrong' or 'right'."""
        return self.folder / ("train.py" if self.pins else f"{version}.py")


def read(folder: Path) -> Exhibit:
    """Reads one exhibit. Raises ValueError for a key that is not known, or missing."""
    found: dict[str, Any] = tomllib.loads((folder / "exhibit.toml").read_text())
    if unknown := found.keys() - {each.name for each in fields(Exhibit)}:
        raise ValueError(f"{folder.name}/exhibit.toml: there is no key {min(unknown)!r}")
    try:
        return Exhibit(name=folder.name, **found)
    except TypeError as error:
        raise ValueError(f"{folder.name}/exhibit.toml: {error}") from None


def exhibits() -> list[Exhibit]:
    """Returns all exhibits, by class and name."""
    found = [read(path.parent) for path in HERE.glob("*/exhibit.toml")]
    return sorted(found, key=lambda each: (each.kind, each.name))


def pins_folder(exhibit: Exhibit, version: str) -> str:
    """Returns the name of the folder that holds the packages of one version: '' where nothing is pinned."""
    packages = exhibit.pins.get(version)
    return packages[0].replace("==", "-") if packages else ""
