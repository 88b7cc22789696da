"""What is planted in a text: `new` for `old`, which stands once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Patch(Protocol):
    """A fault, or another change. name: by which it is told where it does not apply."""

    @property
    def name(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


class FilePatch(Patch, Protocol):
    """A change of one file of a folder, as of the package."""

    @property
    def file(self) -> str: ...


@dataclass(frozen=True)
class Edit:
    """A change that has no name but its text. file: '' where it is of the script."""

    old: str
    new: str
    file: str = ""

    @property
    def name(self) -> str:
        return self.old


@dataclass(frozen=True)
class FileFault:
    """A fault that has a name, in a file of the package."""

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Everywhere(Edit):
    """A change of a text wherever it stands, as of a name."""


def with_patches(text: str, *patches: Patch) -> str:
    """Returns the text with each change, one after the other. Raises ValueError where one does not apply."""
    for patch in patches:
        count = text.count(patch.old)
        if count != 1 and not (count and isinstance(patch, Everywhere)):
            raise ValueError(f"'{patch.name}' does not apply: its text stands {count} times")
        text = text.replace(patch.old, patch.new)
    return text


def plant_in_files(folder: Path, edits: Iterable[Edit], script: str = "") -> None:
    """Makes edits in files of a folder; in `script` those that name no file. Raises ValueError as `with_patches`."""
    for edit in edits:
        file = folder / (edit.file or script)
        file.write_text(with_patches(file.read_text(), edit))


def not_applying(patches: Iterable[FilePatch], folder: Path) -> list[str]:
    """Returns the names of those whose text does not stand once in their file, in a moment, where planting takes
    minutes."""
    return [patch.name for patch in patches if (folder / patch.file).read_text().count(patch.old) != 1]
