"""Packs floating-point arrays into fewer bytes without loss: as differences from an array that is close to them.

Weights after a few steps differ from the first ones in their lower digits alone. Taken as integers, their differences
are small: the upper bytes are almost all 0. Bytes of like significance are put together, and compressed where that
helps; the lowest ones look random, and stay as they are.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Integers = NDArray[np.signedinteger[Any]]

AT_ONCE = 1 << 18  # elements: copies of the largest tensor would need a model's memory
SAMPLED = 16  # one byte in so many is read to decide whether to compress
WORTH = 0.92  # bits of entropy, of 8: bytes with less are compressed
LOW = 3  # lowest bytes: all 0 in a float64 that float32 holds, as in weights that have not moved
FEW = 0.02  # such elements; where there are more, they are marked, and their lowest bytes left out
MOST_TIMES = 64  # its packed bytes: what an array without a neighbour may take when it is unpacked
LENGTH = struct.Struct("<I")


def pack(array: NDArray[Any], near: NDArray[Any] | None = None, near_name: str = "") -> Bytes:
    """Packs a floating-point array. near: one of the same shape that is close to it. shape [length], uint8"""
    parts, lengths = list[bytes](), list[list[int]]()
    for values, close in _blocks(array, near):
        integers = _zigzag(_ordered(values) - (0 if close is None else _ordered(close)))
        columns = np.ascontiguousarray(integers).view(np.uint8).reshape(len(values), -1).T
        short = (integers & _low(integers)) == 0
        mask = zlib.compress(np.packbits(short).tobytes(), 1) if short[::SAMPLED].mean() > FEW else b""
        full = ~short if mask else slice(None)
        packed = [mask, *(_compressed(column[full] if n < LOW else column) for n, column in enumerate(columns))]
        parts += packed
        lengths.append([len(part) for part in packed])
    facts = {"dtype": array.dtype.name, "shape": array.shape, "near": near_name, "lengths": lengths}
    header = json.dumps(facts).encode()
    return np.frombuffer(b"".join([LENGTH.pack(len(header)), header, *parts]), np.uint8)


def near_name(packed: Bytes) -> str:
    """Returns the name that the array's neighbour was given; '' where there is none."""
    name: str = _header(packed)[0]["near"]
    return name


def unpack(packed: Bytes, near: NDArray[Any] | None = None) -> NDArray[Any]:
    """Returns the array that pack(array, near) was given. Raises ValueError for what pack does not write: a file may
    claim any size, and only what `near` or the packed bytes can hold is allocated."""
    facts, position = _header(packed)
    dtype, shape, all_lengths = np.dtype(facts["dtype"]), facts["shape"], facts["lengths"]
    if dtype.kind != "f" or not _are_counts(shape) or not all(map(_are_counts, all_lengths)):
        raise ValueError(f"an array of {dtype} has a header that samestep does not write")
    size = math.prod(shape)
    if any(len(lengths) != dtype.itemsize + 1 for lengths in all_lengths) or len(all_lengths) != -(-size // AT_ONCE):
        raise ValueError(f"{size} numbers of {dtype} have {len(all_lengths)} parts")
    if not (near.shape == tuple(shape) if near is not None else is_held(size * dtype.itemsize, packed)):
        raise ValueError(f"an array of shape {shape} is larger than what is there of it")
    if position + sum(map(sum, all_lengths)) != len(packed):
        raise ValueError("its parts have other lengths than its bytes")
    array = np.empty(shape, dtype)
    for (values, close), lengths in zip(_blocks(array, near), all_lengths, strict=True):
        columns, full = np.zeros((len(values), dtype.itemsize), np.uint8), np.ones(len(values), bool)
        for number, length in enumerate(lengths):
            part, position = packed[position : position + length], position + length
            if length and number == 0:
                bits = _inflated(part, -(-len(values) // 8))
                full = ~np.unpackbits(bits, count=len(values)).view(bool)
            elif length and number <= LOW and lengths[0]:
                columns[full, number - 1] = _expanded(part, int(full.sum()))
            elif length:
                columns[:, number - 1] = _expanded(part, len(values))
        integers = _unzigzag(columns.view(f"i{columns.shape[1]}").reshape(-1))
        _ordered_in(values)[:] = _swapped(integers + (0 if close is None else _ordered(close)))
    return array


def is_held(size_bytes: int, packed: Bytes) -> bool:
    """Returns whether an array of so many bytes that is close to no other may be packed into these. One that is all
    alike takes nearly none, and is stored as it is: a file that claims more than it holds would fill the memory."""
    return size_bytes <= MOST_TIMES * len(packed)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _header(packed: Bytes) -> tuple[dict[str, Any], int]:
    """Returns what the array is, and where its bytes begin."""
    (length,) = LENGTH.unpack(packed[: LENGTH.size].tobytes())
    end = LENGTH.size + length
    return json.loads(packed[LENGTH.size : end].tobytes()), end


def _blocks(array: NDArray[Any], near: NDArray[Any] | None) -> Iterator[tuple[NDArray[Any], NDArray[Any] | None]]:
    """Yields equal parts of flat arrays; those of `near` in the other's dtype."""
    flat, close = array.reshape(-1), None if near is None else near.reshape(-1)
    for first in range(0, flat.size, AT_ONCE):
        part = slice(first, first + AT_ONCE)
        yield flat[part], None if close is None else close[part].astype(array.dtype)


def _ordered_in(values: NDArray[Any]) -> Integers:
    return values.view(f"i{values.itemsize}")


def _ordered(values: NDArray[Any]) -> Integers:
    """Returns floating-point numbers as integers of the same order, a unit in the last place apart."""
    return _swapped(_ordered_in(values))


def _swapped(integers: Integers) -> Integers:
    """Turns the order of the negative numbers around: as floating-point numbers have it, or as integers have it."""
    info = np.iinfo(integers.dtype)
    swapped: Integers = integers ^ ((integers >> (info.bits - 1)) & info.max)
    return swapped


def _zigzag(integers: Integers) -> Integers:
    """Returns 0, -1, 1, -2, … as 0, 1, 2, 3, …: small numbers of either sign have upper bytes of 0."""
    zigzag: Integers = (integers << 1) ^ (integers >> (np.iinfo(integers.dtype).bits - 1))
    return zigzag


def _unzigzag(integers: Integers) -> Integers:
    bits = np.iinfo(integers.dtype)
    unzigzag: Integers = ((integers >> 1) & bits.max) ^ -(integers & 1)
    return unzigzag


def _low(integers: Integers) -> Integers:
    """Returns a mask of the lowest bytes; of all bytes in a type that has no more."""
    return np.full(1, (1 << 8 * LOW) - 1 if integers.itemsize > LOW else -1, integers.dtype)


def _compressed(column: Bytes) -> bytes:
    """Returns bytes, compressed where that helps; none where all are 0."""
    column = np.ascontiguousarray(column)
    if not column.any():
        return b""
    counts = np.bincount(column[::SAMPLED], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    if float(-(shares * np.log2(shares)).sum()) < 8 * WORTH:
        coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
        packed = coder.compress(column.tobytes()) + coder.flush()
        if len(packed) < len(column):
            return packed
    return column.tobytes()


def _expanded(packed: Bytes, length: int) -> Bytes:
    return packed if len(packed) == length else _inflated(packed, length)


def _inflated(packed: Bytes, length: int) -> Bytes:
    """Returns compressed bytes, of which there are `length`: no more are inflated, whatever the file says."""
    inflated = np.frombuffer(zlib.decompressobj().decompress(packed.tobytes(), length), np.uint8)
    if len(inflated) != length:
        raise ValueError(f"{len(inflated)} bytes are there of {length}")
    return inflated
