"""The files of a checkpoint: writes a rank's part, completes a checkpoint, finds the newest one, reads its tensors.

    checkpoints/step-120/rank0.json          the state, with tensors replaced by their keys
    checkpoints/step-120/rank0.safetensors   the tensors, or this rank's pieces of them
    checkpoints/step-120/manifest.json       the digests of the files above

A checkpoint is written to checkpoints/.step-120.part, and renamed when every file of it is on the disk. A tree of
tensors and plain values becomes JSON and named tensors: nothing is pickled.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from samestep.errors import UserError, printable
from samestep.message import Message, as_said, message
from samestep.rank.row_order import pieces_of_block
from samestep.rank.shards import block_of, place_of
from samestep.records.checkpoint import MANIFEST, Manifest, Place, RankPart, files_of, steps_in
from samestep.records.files import read, replace_by, write
from samestep.records.launch_files import OF_A_STEP
from samestep.records.launch_request import LaunchRequest
from samestep.world.regular_files import (
    UNBOUNDED,
    check_regular,
    make_folder,
    make_named_folder,
    move_folder,
    open_regular,
    remove_file,
    remove_folder,
)

TENSOR, TUPLE, PAIRS, COUNTER, FLOAT = "$tensor", "$tuple", "$pairs", "$counter", "$float"


@dataclass(frozen=True)
class Piece:
    """This rank's block of a tensor. shape: of the whole tensor. offset: of the block's first element in it.

    others: its other pieces of the tensor, where it has several.
    """

    block: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    others: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A tensor that is in a checkpoint's files, by its key."""

    key: str


def piece_of(tensor: Tensor, order: Tensor | None = None) -> Piece:
    """Returns this rank's piece of a tensor, in memory that the training does not change. order: of its rows, as
    row_orders() says."""
    return piece_of_block(block_of(tensor), tuple(tensor.shape), place_of(tensor)[1], order)


def piece_of_block(block: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], order: Tensor | None) -> Piece:
    """Returns a copy of a block of a tensor with this shape, as piece_of() does."""
    if order is None:
        return Piece(_copy(block), shape, offset)
    first, *other_pieces = [
        Piece(_copy(block[rows.in_block : rows.in_block + rows.number]), shape, (rows.in_whole, *offset[1:]))
        for rows in pieces_of_block(order, block.shape, offset)
    ] or [Piece(_copy(block), shape, offset)]
    return replace(first, others=tuple(other_pieces))


def _copy(block: Tensor) -> Tensor:
    if block.device.type == "cuda":
        return torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block, non_blocking=True)
    return block.clone(memory_format=torch.contiguous_format)


def pack(tree: Any) -> tuple[Any, dict[str, Piece]]:
    """Returns `tree` as JSON values, and its tensors by key: the path to each, as in 'optimizer/0.weight/exp_avg'.

    The tensors are copied; those on a GPU are complete after torch.cuda.synchronize(). Raises UserError for a value
    that is neither a tensor nor plain.
    """
    pieces: dict[str, Piece] = {}

    def packed(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            value = piece_of(value)
        if isinstance(value, Piece):
            pieces[path] = value
            pieces.update({f"{path}[{number}]": piece for number, piece in enumerate(value.others, 1)})
            return {TENSOR: path}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {FLOAT: repr(value)}
        if isinstance(value, Mapping):
            if all(isinstance(name, str) and not name.startswith("$") for name in value):
                return {name: packed(inner, f"{path}/{name}" if path else name) for name, inner in value.items()}
            pairs = [[name, packed(inner, f"{path}/{name}")] for name, inner in value.items()]
            return {COUNTER if isinstance(value, Counter) else PAIRS: pairs}
        if isinstance(value, list) or type(value) in (tuple, torch.Size):
            inside = [packed(inner, f"{path}/{number}") for number, inner in enumerate(value)]
            return inside if isinstance(value, list) else {TUPLE: inside}
        raise UserError(message("checkpoint_cannot_hold", what=path, type=type(value).__name__))

    return packed(tree, ""), pieces


def unpack(packed: Any, tensor_of: Callable[[str], Any] = Stored) -> Any:
    """Returns the tree given to pack(). tensor_of: (key) -> what takes a tensor's place; Stored where not given."""
    if isinstance(packed, list):
        return [unpack(inner, tensor_of) for inner in packed]
    if not isinstance(packed, Mapping):
        return packed
    if len(packed) == 1:
        ((tag, value),) = packed.items()
        if tag == TENSOR:
            return tensor_of(value)
        if tag == FLOAT:
            return float(value)
        if tag == TUPLE:
            return tuple(unpack(inner, tensor_of) for inner in value)
        if tag in (PAIRS, COUNTER):
            pairs = {name: unpack(inner, tensor_of) for name, inner in value}
            return Counter(pairs) if tag == COUNTER else pairs
    return {name: unpack(inner, tensor_of) for name, inner in packed.items()}


def merged(trees: list[Any]) -> Any:
    """Returns the packed trees of all ranks as one. Of what several ranks have, the first one's is taken."""
    first = trees[0]
    if not isinstance(first, dict) or any(name.startswith("$") for name in first):
        return first
    of_name: dict[str, list[Any]] = {}
    for tree in trees:
        for name, value in tree.items():
            of_name.setdefault(name, []).append(value)
    return {name: merged(values) for name, values in of_name.items()}


class Damaged(Exception):
    """A checkpoint that is incomplete, or whose files are not those that were written. why: which."""

    def __init__(self, why: Message) -> None:
        super().__init__(why)
        self.why = why


def part_folder(folder: Path, step: int) -> Path:
    """Returns the folder in which the checkpoint of a step is written."""
    return folder / f".step-{step}.part"


def write_part(folder: Path, rank: int, tree: Any, pieces: Mapping[str, Piece], files: Mapping[str, IO[bytes]]) -> None:
    """Writes this rank's part into `folder`, and syncs it to the disk. files: name -> what to keep with it."""
    from safetensors.torch import save_file

    make_named_folder(folder.parents[1])
    make_folder(folder.parent)
    make_folder(folder)
    part, tensors = (folder / name for name in files_of(rank))
    nonempty = {key: piece for key, piece in pieces.items() if piece.block.numel() or not math.prod(piece.shape)}
    remove_file(tensors)
    save_file({key: piece.block for key, piece in nonempty.items()}, tensors)
    sync(tensors)
    for name, file in files.items():
        replace_by(folder / name, partial(shutil.copyfileobj, file))
    piece_of = {f"{key}[{number}]": key for key, piece in pieces.items() for number in range(1, 1 + len(piece.others))}
    places = {
        key: Place(piece.shape, piece.offset, piece_of.get(key, ""))
        for key, piece in nonempty.items()
        if piece.shape != tuple(piece.block.shape)
    }
    write(part, RankPart(tree, places))


def complete(folder: Path, step: int, engine: str, world_size: int, request: LaunchRequest | None) -> Path:
    """Completes the checkpoint whose parts all ranks have written: digests, manifest, rename. Returns its folder."""
    part = part_folder(folder, step)
    files = sorted(path for path in part.iterdir() if not path.name.startswith("."))
    digests = {path.name: digest(path) for path in files}
    size = sum(path.stat().st_size for path in files)
    manifest = Manifest(step, engine, world_size, written_at=time.time(), files=digests, bytes=size, asked=request)
    write(part / MANIFEST, manifest.sealed())
    sync(part)
    done = folder / f"step-{step}"
    # A checkpoint of a training that was here before, and was resumed from an earlier checkpoint.
    remove_folder(done, OF_A_STEP)
    move_folder(part, done)
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
            raise Damaged(as_said(f"{checkpoint / MANIFEST} {flaw}"))
        for name, expected in manifest.files.items():
            if digest(checkpoint / name, manifest.bytes) != expected:
                raise Damaged(message("file_changed_since_it_was_written", file=checkpoint / name))
    except OSError as error:
        raise Damaged(as_said(f"{error.filename}: {error.strerror}")) from error
    except UserError as error:
        raise Damaged(as_said(str(error).partition("; ")[0])) from error
    return manifest


def newest(folder: Path, passed_over: Callable[[Message], None]) -> Path | None:
    """Returns the newest checkpoint of a folder that is undamaged; None where there is none.

    passed_over: called with a message about each that is damaged.
    """
    for step in steps_in(folder):
        try:
            checked(folder / f"step-{step}")
        except Damaged as error:
            passed_over(message("checkpoint_passed_over", step=step, why=error.why))
        else:
            return folder / f"step-{step}"
    return None


def prune(folder: Path, keep: int, newest: int) -> None:
    """Removes all but `keep` checkpoints: that of step `newest`, which was just written, and those before it.

    A later one is damaged, or from before the training continued at an earlier one: it must not count in place of one
    that was just written, which would be removed at once.
    """
    steps = [step for step in steps_in(folder) if step <= newest and not (folder / f"step-{step}").is_symlink()]
    for step in steps[keep:]:
        gone = folder / f".step-{step}.gone"  # renamed first: a half-removed one must not look complete
        move_folder(folder / f"step-{step}", gone)
        remove_folder(gone, OF_A_STEP)


def remove_remains(folder: Path) -> None:
    """Removes what a training that was killed has left: half-written and half-removed checkpoints."""
    for path in [*folder.glob(".step-*.part"), *folder.glob(".step-*.gone")]:
        if path.is_symlink():
            remove_file(path)  # a checkpoint would be written where it leads
        remove_folder(path, OF_A_STEP)


class Saved:
    """A checkpoint that is read. state: its tree, with a Stored in place of each tensor."""

    def __init__(self, folder: Path) -> None:
        """Opens it. Raises UserError for one that is not as samestep writes it, whoever has sealed it."""
        from safetensors import SafetensorError

        self.folder = folder
        try:
            self._open()
        except (SafetensorError, OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(foreign(folder, as_said(printable(error, 300)))) from None

    def _open(self) -> None:
        self.manifest = read(Manifest, self.folder / MANIFEST)
        if flaw := self.manifest.flaw(self.folder):
            raise ValueError(f"{MANIFEST} {flaw}")
        self._open_parts(self.manifest.world_size)

    @classmethod
    def of_parts(cls, folder: Path, world_size: int) -> Saved:
        """Returns what ranks have written with write_part alone, without a manifest. Files that were cut off raise."""
        saved = cls.__new__(cls)
        saved.folder = folder
        saved._open_parts(world_size)
        return saved

    def _open_parts(self, world_size: int) -> None:
        from safetensors import safe_open

        names = [files_of(rank) for rank in range(world_size)]
        parts = [read(RankPart, self.folder / part) for part, _ in names]
        self.state: Any = unpack(merged([part.tree for part in parts]))
        # The key of a tensor -> of each piece of it: the file, its key there, and where it is.
        self._pieces: dict[str, list[tuple[Any, str, Place | None]]] = {}
        for (_, tensors), part in zip(names, parts):
            check_regular(self.folder / tensors)
            opened: Any = safe_open(self.folder / tensors, "pt")
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                place = part.places.get(key)
                of_tensor = (place.piece_of if place else "") or key
                self._pieces.setdefault(of_tensor, []).append((opened, key, place))

    def _pieces_of(self, stored: Stored) -> list[tuple[Any, str, Place | None]]:
        if not isinstance(stored, Stored) or stored.key not in self._pieces:
            raise UserError(
                foreign(self.folder, message("tensor_missing", tensor=printable(getattr(stored, "key", stored), 80)))
            )
        return self._pieces[stored.key]

    def open(self, name: str) -> IO[bytes]:
        """Opens a file that was kept with the state. Raises UserError where the checkpoint has none of this name."""
        if name not in self.manifest.files:
            raise UserError(message("checkpoint_lacks", checkpoint=self.folder, what=name))
        return open_regular(self.folder / name)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        opened, key, place = self._pieces_of(stored)[0]
        return place.shape if place else tuple(opened.get_slice(key).get_shape())

    def numel(self, stored: Stored) -> int:
        """Returns how many values a whole tensor has."""
        return math.prod(self.shape(stored))

    def dtype(self, stored: Stored) -> torch.dtype:
        """Returns the dtype of a tensor."""
        opened, key, _ = self._pieces_of(stored)[0]
        first = opened.get_slice(key)
        dtype: torch.dtype = (first[:0] if first.get_shape() else opened.get_tensor(key)).dtype
        return dtype

    def tensor(
        self, stored: Stored, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Returns a tensor, or the block of it with this offset and shape, put together from all ranks' pieces."""
        (opened, key, first), *_ = pieces = self._pieces_of(stored)
        block_shape = self.shape(stored) if shape is None or offset is None else tuple(shape)
        if first is None and block_shape == self.shape(stored):
            tensor: Tensor = opened.get_tensor(key)
            return tensor
        offset = offset or (0,) * len(block_shape)
        overlaps = []
        for opened, key, place in pieces:
            piece = opened.get_slice(key)
            piece_offset = place.offset if place else (0,) * len(block_shape)
            spans = list(_overlap(offset, block_shape, piece_offset, piece.get_shape()))
            if all(start < end for start, end in spans):
                overlaps.append((piece, piece_offset, spans))
        found = sum(math.prod(end - start for start, end in spans) for _, _, spans in overlaps)
        if found != math.prod(block_shape):  # before memory is taken for it: the shape is only what the file says
            sizes = {"found": found, "values": math.prod(block_shape)}
            raise UserError(message("tensor_incomplete", checkpoint=self.folder, tensor=stored.key, **sizes))
        block = torch.empty(block_shape, dtype=self.dtype(stored))
        for piece, piece_offset, spans in overlaps:
            values = piece[tuple(slice(start - first, end - first) for (start, end), first in zip(spans, piece_offset))]
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


def foreign(folder: Path, why: Message) -> Message:
    """Returns the message for a checkpoint that is sealed, and yet not as samestep writes it."""
    return message("checkpoint_not_as_samestep_writes_it", checkpoint=folder, why=why)


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields for each dimension the first index of what two blocks share, and the one after the last."""
    for start, size, second_first, second_size in zip(offset, shape, other_offset, other_shape):
        yield max(start, second_first), min(start + size, second_first + second_size)
