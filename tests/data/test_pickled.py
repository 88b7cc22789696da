"""Pickled arrays of others: what numpy writes is read, and nothing that a pickle names is run."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.data.pickled import read_pickled
from samestep.errors import UserError
from samestep.jobs.cifar10 import batch

PIXELS = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def python2(pixels: bytes) -> bytes:
    """A batch as Python 2 and numpy 1 have written it: bytes are texts (SHORT_BINSTRING, BINSTRING)."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x01M\x00\x0ct"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tb"
    )
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_numpy_pickles_is_read_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    content = {
        "data": PIXELS,
        "labels": [1, np.int64(2)],
        "turned": np.asfortranarray(PIXELS[:, :4].astype(">i4")),
        "empty": b"",
        "names": ["a.png", "b.png"],
        "batch_label": "training batch 1 of 5",
    }
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol))
    read = read_pickled(tmp_path / "batch")
    assert {name: str(value) for name, value in read.items()} == {name: str(value) for name, value in content.items()}
    assert read["data"].flags.writeable and read["turned"].dtype == content["turned"].dtype


def test_the_published_form_is_read(tmp_path: Path) -> None:
    pixels = bytes(range(256)) * 12
    (tmp_path / "batch").write_bytes(python2(pixels))
    assert pickletools.dis(python2(pixels), out=io.StringIO()) is None  # a whole pickle
    array, labels = batch(tmp_path / "batch")
    assert array.tobytes() == pixels and labels == [7]


CODE = {
    "a command": pickle.dumps(Runs(os.system, "touch canary")),
    "code": pickle.dumps(Runs(eval, "open('canary', 'w')")),
    "an import": pickle.dumps(Runs(__import__, "antigravity")),
    "a file of numpy": pickle.dumps(Runs(np.load, "canary")),
    "an array of objects": pickle.dumps(np.array([Runs(os.system, "touch canary")], dtype=object)),
    "a name with dots": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
    "a persistent object": b"\x80\x04\x8c\x01xQ.",
    "many bytes": b"\x80\x04c__builtin__\nbytes\nM\xff\xff\x85R.",
    "a shape that is not its bytes": python2(b"x" * 3072).replace(b"M\x00\x0c", b"M\xff\xff"),
    "cut short": pickle.dumps(PIXELS)[:100],
    "no pickle": b"hello",
    "empty": b"",
    "nothing on the stack": b".",
}


@pytest.mark.parametrize("content", CODE)
def test_a_pickle_that_would_run_something_is_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch").write_bytes(CODE[content])
    with pytest.raises(UserError, match=r"batch is no .*arrays"):
        read_pickled(Path("batch"))
    assert os.listdir() == ["batch"]


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ([PIXELS], "data"),
        ({"data": PIXELS.astype(np.float32), "labels": [0, 1]}, "data"),
        ({"data": PIXELS, "labels": [0]}, "labels"),
        ({"data": PIXELS, "labels": [0, 10]}, "labels"),
        ({"data": PIXELS, "fine_labels": [0, 1]}, "labels"),
        ({"data": PIXELS, "labels": [0, [1]]}, "labels"),
    ],
)
def test_a_batch_of_another_form_is_refused(content: Any, lacks: str, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=f"has no '{lacks}'"):
        batch(tmp_path / "batch")
