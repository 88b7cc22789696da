"""The files of a checkpoint: writes a rank's part, completes a checkpoint, finds the newest one, reads its tensors.

    checkpoints/step-120/rank0.json          the state, with tensors replaced by their keys
    checkpoints/step-120/rank0.safetensors   the tensors, or this rank's pieces of them
    checkpoints/step-120/manifest.json       the digests of the files above

A checkpoint is written to checkpoints/.step-120.part, and renamed when every file of it is on the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from samestep.errors import UserError, printable
from samestep.rank.packed import Piece, Stored, merged, unpack
from samestep.records.checkpoint import MANIFEST, Manifest, Place, RankPart, files_of, steps_in
from samestep.records.files import read, replace_by, write
from samestep.records.launch_request import LaunchRequest
from samestep.world.regular_files import UNBOUNDED, check_regular, open_regular


class Damaged(Exception):
    """A checkpoint that is incomplete, or whose files are not those that were written. The text says which."""


def part_folder(folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of a step is written."""
    return folder / f".step-{step}.part"


def write_part(folder: Path, rank: int, tree: Any, pieces: Mapping[str, Piece], files: Mapping[str, IO[bytes]]) -> None:
    """Writes this rank's part into `folder`, and syncs it to the disk. files: name -> what to keep with it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part, tensors = (folder / name for name in files_of(rank))
    here = {key: piece for key, piece in pieces.items() if piece.block.numel() or not math.prod(piece.shape)}
    save_file({key: piece.block for key, piece in here.items()}, tensors)
    sync(tensors)
    for name, file in files.items():
        replace_by(folder / name, partial(shutil.copyfileobj, file))
    places = {
        key: Place(piece.shape, piece.offset) for key, piece in here.items() if piece.shape != tuple(piece.block.shape)
    }
    write(part, RankPart(tree, places))


def complete(folder: Path, step: int, engine: str, world_size: int, request: LaunchRequest | None) -> Path:
    """Completes the checkpoint whose parts all ranks have written: digests, manifest, rename. Returns its folder."""
    part = part_folder(folder, step)
    files = sorted(path for path in part.iterdir() if not path.name.startswith("."))
    digests = {path.name: digest(path) for path in files}
    size = sum(path.stat().st_size for path in files)
    write(part / MANIFEST, Manifest(step, engine, world_size, time.time(), digests, size, request).sealed())
    sync(part)
    done = folder / f"step-{step}"
    shutil.rmtree(done, ignore_errors=True)  # of a training that came here before, and was resumed from an earlier one
    os.replace(part, done)
    sync(folder)
    return done


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def digest(path: Path, most: int = UNBOUNDED) -> str:
    """Returns the BLAKE2b digest of a file, which has at most `most` bytes."""
    state = hashlib.blake2b(digest_size=16)
    with open_regular(path, most) as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def checked(checkpoint: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after comparing every file's digest. Raises Damaged."""
    try:
        manifest = read(Manifest, checkpoint / MANIFEST)
        if flaw := manifest.flaw(checkpoint):
            raise Damaged(f"{checkpoint / MANIFEST} {flaw}")
        for name, expected in manifest.files.items():
            if digest(checkpoint / name, manifest.bytes) != expected:
                raise Damaged(f"{checkpoint / name} has changed since it was written")
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from error
    except UserError as error:
        raise Damaged(str(error).partition("; ")[0]) from error
    return manifest


def newest(folder: Path, passed_over: Callable[[str], None]) -> Path | None:
    """Returns the newest checkpoint of a folder that is undamaged; None where there is none.

    passed_over: called with a sentence about each that is damaged.
    """
    for step in steps_in(folder):
        try:
            checked(folder / f"step-{step}")
        except Damaged as error:
            passed_over(f"the checkpoint of step {step} is damaged and passed over: {error}")
        else:
            return folder / f"step-{step}"
    return None


def prune(folder: Path, keep: int, newest: int) -> None:
    """Removes all but `keep` checkpoints: that of step `newest`, which was just written, and those before it.

    A later one is damaged, or from before the training continued at an earlier one: it must not count in place of one
    that was just written, which would be removed at once.
    """
    for step in [step for step in steps_in(folder) if step <= newest][keep:]:
        gone = folder / f".step-{step}.gone"  # renamed first: a half-removed one must not look complete
        os.replace(folder / f"step-{step}", gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_remains(folder: Path) -> None:
    """Removes what a training that was killed has left: half-written and half-removed checkpoints."""
    for path in [*folder.glob(".step-*.part"), *folder.glob(".step-*.gone")]:
        if path.is_symlink():
            path.unlink()  # a checkpoint would be written where it leads
        shutil.rmtree(path, ignore_errors=True)


class Saved:
    """A checkpoint that is read. state: its tree, with a Stored in place of each tensor."""

    def __init__(self, folder: Path) -> None:
        """Opens it. Raises UserError for one that is not as samestep writes it, whoever has sealed it."""
        from safetensors import SafetensorError

        self.folder = folder
        try:
            self._open()
        except (SafetensorError, OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(foreign(folder, printable(error, 300))) from None

    def _open(self) -> None:
        from safetensors import safe_open

        self.manifest = read(Manifest, self.folder / MANIFEST)
        if flaw := self.manifest.flaw(self.folder):
            raise ValueError(f"{MANIFEST} {flaw}")
        names = [files_of(rank) for rank in range(self.manifest.world_size)]
        parts = [read(RankPart, self.folder / part) for part, _ in names]
        self.state: Any = unpack(merged([part.tree for part in parts]))
        self._pieces: dict[str, list[tuple[Any, Place | None]]] = {}
        for (_, tensors), part in zip(names, parts):
            check_regular(self.folder / tensors)
            opened: Any = safe_open(self.folder / tensors, "pt")
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                self._pieces.setdefault(key, []).append((opened, part.places.get(key)))

    def _pieces_of(self, stored: Stored) -> list[tuple[Any, Place | None]]:
        if not isinstance(stored, Stored) or stored.key not in self._pieces:
            raise UserError(foreign(self.folder, f"it has no tensor {printable(getattr(stored, 'key', stored), 80)}"))
        return self._pieces[stored.key]

    def open(self, name: str) -> IO[bytes]:
        """Opens a file that was kept with the state. Raises UserError where the checkpoint has none of this name."""
        if name not in self.manifest.files:
            raise UserError(f"the checkpoint {self.folder} has no {name}, which the job needs; give another one")
        return open_regular(self.folder / name)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        opened, place = self._pieces_of(stored)[0]
        return place.shape if place else tuple(opened.get_slice(stored.key).get_shape())

    def numel(self, stored: Stored) -> int:
        """Returns how many values a whole tensor has."""
        return math.prod(self.shape(stored))

    def dtype(self, stored: Stored) -> torch.dtype:
        """Returns the dtype of a tensor."""
        opened, _ = self._pieces_of(stored)[0]
        first = opened.get_slice(stored.key)
        dtype: torch.dtype = (first[:0] if first.get_shape() else opened.get_tensor(stored.key)).dtype
        return dtype

    def tensor(
        self, stored: Stored, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Returns a tensor, or the block of it with this offset and shape, put together from all ranks' pieces."""
        (opened, first), *_ = pieces = self._pieces_of(stored)
        whole = self.shape(stored) if shape is None or offset is None else tuple(shape)
        if first is None and whole == self.shape(stored):
            tensor: Tensor = opened.get_tensor(stored.key)
            return tensor
        offset = offset or (0,) * len(whole)
        overlaps = []
        for opened, place in pieces:
            piece = opened.get_slice(stored.key)
            at = place.offset if place else (0,) * len(whole)
            spans = list(_overlap(offset, whole, at, piece.get_shape()))
            if all(start < end for start, end in spans):
                overlaps.append((piece, at, spans))
        found = sum(math.prod(end - start for start, end in spans) for _, _, spans in overlaps)
        if found != math.prod(whole):  # before there is memory for it: the shape is what the file says
            raise UserError(
                f"the checkpoint {self.folder} has only {found} of the {math.prod(whole)} values of {stored.key}"
            )
        block = torch.empty(whole, dtype=self.dtype(stored))
        for piece, at, spans in overlaps:
            values = piece[tuple(slice(start - first, end - first) for (start, end), first in zip(spans, at))]
            block[tuple(slice(start - first, end - first) for (start, end), first in zip(spans, offset))] = values
        return block

    def plain(self, tree: Any) -> Any:
        """Returns a part of `state` with its tensors read."""
        if isinstance(tree, Stored):
            return self.tensor(tree)
        if isinstance(tree, dict):
            return type(tree)({name: self.plain(inner) for name, inner in tree.items()})
        if isinstance(tree, list | tuple):
            return type(tree)([self.plain(inner) for inner in tree])
        return tree


def foreign(folder: Path, why: str) -> str:
    """Returns the sentence for a checkpoint that is sealed, and yet not as samestep writes it."""
    return f"the checkpoint {folder} is not as samestep writes it: {why}; give another one with --resume"


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields for each dimension the first index of what two blocks share, and the one after the last."""
    for first, size, other, other_size in zip(offset, shape, other_offset, other_shape):
        yield max(first, other), min(first + size, other + other_size)
