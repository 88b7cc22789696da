"""Files that are not as expected, by name: what is in place of a record, of an array or of a pickle."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from samestep.records.packed import AT_ONCE, LENGTH, pack

CANARY = "canary"  # the file that code in one of these would write into the current folder
DEEP = 100_000
CODE = b"cos\nsystem\n(S'touch canary'\ntR."


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _sparse(begin: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, 10 << 30)

    return write


def _npy(header: bytes, values: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values


def _zip(content: bytes, compression: int = zipfile.ZIP_STORED, name: str = "tensor a.npy") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(name, content)
    return buffer.getvalue()


def _objects() -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return _npy(header, CODE)


def _zeros(count: int) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(count, np.uint8))
    return buffer.getvalue()


def _overlapping(count: int) -> bytes:
    """An archive whose members are the same bytes, under several names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("tensor a.npy", _zeros(1000))
        for number in range(count):
            other = copy.copy(file.filelist[0])
            other.filename = f"tensor b{number}.npy"
            file.filelist.append(other)
            file.NameToInfo[other.filename] = other
    return buffer.getvalue()


def _packed(**facts: object) -> bytes:
    """An archive with a packed tensor of one element, whose header claims these facts instead of its own."""
    array = pack(np.ones(1))
    (length,) = LENGTH.unpack(array[:4].tobytes())
    header = json.dumps(json.loads(array[4 : 4 + length].tobytes()) | facts).encode()
    buffer = io.BytesIO()
    parts = [LENGTH.pack(len(header)), header, array[4 + length :].tobytes()]
    np.save(buffer, np.frombuffer(b"".join(parts), np.uint8))
    return _zip(buffer.getvalue(), name="packed a.npy")


CLAIM = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }\n"
HEADER = json.dumps({"a": {"dtype": "F64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}}).encode()

ANY: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "folder": lambda path: path.mkdir(),
    "link to /dev/zero": _link("/dev/zero"),
    "link to /dev/tty": _link("/dev/tty"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": _link("nowhere"),
    "link to a password": _link("/etc/shadow"),
    "empty": _bytes(b""),
    "10 GB of zeros": _sparse(b""),
    "pickle": _bytes(CODE),
}
JSON: dict[str, Callable[[Path], None]] = {
    "10 GB after a brace": _sparse(b'{"schema": '),
    "deep lists": _bytes(b'{"schema": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "deep names": _bytes(b'{"a": ' * DEEP + b"1" + b"}" * DEEP),
    "NaN": _bytes(b'{"schema": NaN}'),
    "a name twice": _bytes(b'{"schema": 1, "schema": 5}'),
    "latin1": _bytes(b'{"schema": "\xe9"}'),
    "utf-16": _bytes('{"schema": 5}'.encode("utf-16")),
    "cut short": _bytes(b'{"schema": 5, "name": "x'),
    "a list": _bytes(b"[1, 2]"),
    "a number of 10,000 digits": _bytes(b'{"schema": ' + b"9" * 10_000 + b"}"),
    "a surrogate and an escape": _bytes(b'{"schema": "\\ud800\\u001b[2J\\n$(touch canary)"}'),
}
NPZ: dict[str, Callable[[Path], None]] = {
    "objects": _bytes(_zip(_objects())),
    "a terabyte in the header": _bytes(_zip(_npy(CLAIM))),
    "bomb": _bytes(_zip(_zeros(50_000_000), zipfile.ZIP_DEFLATED)),
    "no array": _bytes(_zip(b"hello")),
    "another name": _bytes(_zip(_zeros(1), name="../../canary.npy")),
    "elements without bytes": _bytes(
        _zip(_npy(b"{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }\n"))
    ),
    "members that are the same bytes": _bytes(_overlapping(20)),
    "packed: more than its bytes": _bytes(_packed(shape=[100 * AT_ONCE], lengths=[[0] * 9] * 100)),
    "packed: parts beyond its bytes": _bytes(_packed(lengths=[[0, 0, 0, 0, 0, 0, 0, 1, 10**12]])),
    "packed: columns by the million": _bytes(_packed(lengths=[[0] * 1_000_000])),
    "packed: another number of parts": _bytes(_packed(shape=[10**12])),
    "packed: a shape of texts": _bytes(_packed(shape=["a" * 1000, 10**9])),
    "packed: a shape that is negative": _bytes(_packed(shape=[-1])),
    "packed: a shape beyond any": _bytes(_packed(shape=[10**400])),
    "a neighbour elsewhere": _bytes(
        _zip(
            _npy(
                b"{'descr': '|u1', 'fortran_order': False, 'shape': (32,), }\n",
                b'\x1c\0\0\0{"near": "../../../../etc/x"}',
            ),
            name="packed a.npy",
        )
    ),
    "a neighbour that is itself": _bytes(
        _zip(
            _npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (19,), }\n", b'\x0f\0\0\0{"near": "end"}'),
            name="packed a.npy",
        )
    ),
    "cut short": _bytes(_zip(_zeros(100))[:150]),
}
NPY: dict[str, Callable[[Path], None]] = {
    "objects": _bytes(_objects()),
    "a terabyte in the header": _bytes(_npy(CLAIM)),
    "code in the header": _bytes(_npy(b"__import__('os').system('touch canary')\n")),
}
SAFETENSORS: dict[str, Callable[[Path], None]] = {
    "a header of 2^63 bytes": _bytes((1 << 63).to_bytes(8, "little") + b"{}"),
    "a terabyte in the header": _bytes(len(HEADER).to_bytes(8, "little") + HEADER),
    "deep header": _bytes((2 * DEEP).to_bytes(8, "little") + b"[" * DEEP + b"]" * DEEP),
}
