"""Reads pickled arrays without running what a pickle can run: numpy's arrays and numbers, lists, dicts, texts, bytes.

A pickle is a program: unpickled as usual, a file from elsewhere can start any command. Here nothing that it names is
imported or called. What numpy's pickles name is rebuilt by the classes below, of every protocol and of numpy 1 and 2.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UserError, printable
from samestep.world.regular_files import read_regular

NUMBERS = re.compile("b1|[iu][1248]|f[248]")  # the dtypes that are read; one of objects holds others' classes


def read_pickled(path: Path) -> Any:
    """Returns what a file of pickled arrays holds; Python 2's texts are read as latin1.

    Raises UserError for a file that is no pickle, or names anything besides arrays, numbers and texts.
    """
    try:
        content = read_regular(path)
        return _plain(_Arrays(io.BytesIO(content), encoding="latin1").load())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the folder of the pickled files") from None
    except Exception as error:  # of a damaged pickle: of nearly every kind
        why = printable(error, 200) or type(error).__name__
        raise UserError(f"{path} is no file of pickled arrays: {why}; give the files as they are published") from None


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        place = re.sub(r"^numpy\._core\b", "numpy.core", module)
        try:
            return STAND_INS[place, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which would run") from None


class _Dtype:
    """Stands for numpy.dtype: called with 'u1' or the like, then given its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if not NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"it has an array of dtype {code}, which holds no numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(">" if state[1] == ">" else "<")


class _Array:
    """Stands for an array that numpy makes empty and then fills."""

    array: Any

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, values = state
        self.array = _array(_bytes_of(values), dtype, shape, "F" if fortran else "C")


class _Type:
    """Stands for numpy.ndarray, which pickles name and only numpy calls."""


def _from_buffer(values: Any, dtype: _Dtype, shape: tuple[int, ...], order: str) -> Any:
    return _array(bytes(memoryview(values)), dtype, shape, order)


def _number(dtype: _Dtype, value: Any) -> Any:
    return _array(_bytes_of(value), dtype, (), "C")[()]


def _array(values: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> Any:
    if len(values) != math.prod(shape) * dtype.dtype.itemsize:
        raise pickle.UnpicklingError(f"an array of shape {shape} has {len(values)} bytes")
    # A copy, which can be written to.
    return np.frombuffer(values, dtype.dtype).reshape(shape, order="F" if order == "F" else "C").copy(order="A")


def _bytes_of(values: bytes | str) -> bytes:
    return values.encode("latin1") if isinstance(values, str) else values


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes in old protocols


def _no_bytes() -> bytes:
    return b""


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.multiarray", "scalar"): _number,
    ("numpy", "ndarray"): _Type,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
}


def _plain(value: Any) -> Any:
    """Returns a value with the arrays in place of what stood for them, down to the values of a dict or a list."""
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, dict):
        return {name: inner.array if isinstance(inner, _Array) else inner for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(inner.array if isinstance(inner, _Array) else inner for inner in value)
    return value
