"""A checkpoint's files besides its tensors: the manifest, and what each rank has written; and the list of an export's
files, which alone it may remove."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from samestep.errors import printable
from samestep.records.files import as_json, replace_text
from samestep.records.launch_request import LaunchRequest
from samestep.world.regular_files import read_regular

MANIFEST = "manifest.json"
FOLDER = "checkpoints"  # in a run's folder
NAME = re.compile(r"step-([0-9]+)")
FILE = re.compile(r"\w[\w. -]*")  # characters of the names of files: a file of a checkpoint is in its folder


def files_of(rank: int) -> tuple[str, str]:
    """Returns the names of the files that each rank writes: its part of the state, and its tensors."""
    return f"rank{rank}.json", f"rank{rank}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, the newest first."""
    matches = [NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]) for match in matches if match), reverse=True)


@dataclass(frozen=True)
class Interval:
    """How far apart checkpoints are: `count` steps, epochs or seconds."""

    count: float
    unit: Literal["steps", "epochs", "s"]


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint. It is written last, when all other files of the checkpoint are on the disk."""

    step: int
    """How many optimizer steps were done."""

    engine: str
    """The name of the engine that wrote the checkpoint."""

    world_size: int
    """The number of ranks that wrote the checkpoint."""

    written_at: float
    """When the checkpoint was written: Unix time, in seconds."""

    files: Mapping[str, str]
    """The name of each other file -> the BLAKE2b digest of its bytes."""

    bytes: int
    """The size of all files, in bytes."""

    asked: LaunchRequest | None = None
    """What was trained. None: not recorded."""

    seal: str = ""
    """A digest of all other fields. '': the manifest is not sealed yet."""

    def sealed(self) -> Manifest:
        """Returns it with its seal."""
        text = json.dumps(as_json(replace(self, seal="")), sort_keys=True)
        return replace(self, seal=hashlib.blake2b(text.encode(), digest_size=16).hexdigest())

    def flaw(self, folder: Path) -> str | None:
        """Returns why it is not the manifest of the checkpoint in `folder`; None: it is. Its files are not read."""
        name = NAME.fullmatch(folder.name)
        outside = [file for file in self.files if not FILE.fullmatch(file)]
        ranks = range(min(self.world_size, len(self.files) + 1))
        missing = [file for rank in ranks for file in files_of(rank) if file not in self.files]
        if self.seal != self.sealed().seal:
            return "has changed since it was written"
        if name and int(name[1]) != self.step:
            return f"is of step {self.step}, so that its folder was renamed; its name is step-{self.step}"
        if outside:
            return f"names a file outside of its folder: {printable(outside[0], 80)}"
        if self.world_size < 1 or missing:
            return f"does not list the files of its {self.world_size} ranks: {', '.join(missing[:2]) or 'none'}"
        return None


@dataclass(frozen=True)
class Place:
    """Where a piece is in its tensor: the tensor's shape, and the index of the piece's first element.

    piece_of: the key of the tensor, of which a rank may have several pieces; '': the piece's own.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    piece_of: str = ""


@dataclass(frozen=True)
class RankPart:
    """What one rank has written. tree: the state, with tensors replaced by their keys in the rank's safetensors file.

    places: of those tensors that are pieces of larger ones.
    """

    tree: Any
    places: Mapping[str, Place] = field(default_factory=dict)


LIST = ".samestep-export"
MOST_BYTES = 1 << 20


def write_list(folder: Path) -> None:
    """Notes that an export has written all files that are in `folder`."""
    replace_text(folder / LIST, "\n".join(sorted(_files(folder))))


def other_file(folder: Path) -> str:
    """Returns the name of a file in `folder` that no export has written; '' where there is none."""
    written = {LIST}
    with suppress(OSError, ValueError):
        written |= {*read_regular(folder / LIST, MOST_BYTES).decode().split("\n")}
    return min(_files(folder) - written, default="")


def _files(folder: Path) -> set[str]:
    """Returns the names of what is in a folder, with those in its folders; an empty folder is no file."""
    return {
        os.path.relpath(os.path.join(inside, name), folder)
        for inside, folders, files in os.walk(folder)
        for name in [
            *files,
            *(link for link in folders if os.path.islink(os.path.join(inside, link))),
        ]
    }
