"""Reads and writes the tensors of a record: `rankR.NAME.npz` in the launch folder, named as in the state dict."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from samestep.errors import TrainingFailed
from samestep.records.files import replace_by

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Arrays = Mapping[str, NDArray[np.generic]]

PREFIX = "tensor "  # so that no tensor's name is an argument of numpy.savez
PACKED = "packed "  # of the names of tensors that packed.py has made smaller


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes named arrays to `path` (.npz), atomically."""
    _write(path, {PREFIX + name: array for name, array in arrays.items()})


def write_state(folder: Path, rank: int, name: str, state: Mapping[str, Tensor]) -> None:
    """Writes a state dict's tensors, for Record.arrays(name). bfloat16, which numpy does not have, becomes float32."""
    write_arrays(_path(folder, rank, name), dict(_numpy(state)))


def write_packed(folder: Path, rank: int, name: str, state: Mapping[str, Tensor], near: str = "") -> None:
    """Writes a state dict's tensors in fewer bytes, without loss, for Record.arrays(name).

    near: the name of another state of this rank, to which this one is close; '': none. It must stay where it is.
    """
    from samestep.records.packed import pack

    arrays: dict[str, NDArray[Any]] = {}
    known = set(names(folder, rank, near)) if near else set()
    for key, array in _numpy(state):
        if array.dtype.kind != "f":
            arrays[PREFIX + key] = array
            continue
        close = read_array(folder, rank, near, key) if key in known else None
        if close is not None and close.shape != array.shape:
            close = None
        arrays[PACKED + key] = pack(array, close, near if close is not None else "")
    _write(_path(folder, rank, name), arrays)


def _write(path: Path, named: Arrays) -> None:
    import numpy as np

    # The stub takes the names for options.
    replace_by(path, lambda file: np.savez(file, **named), sync=False)  # type: ignore[arg-type]


def _numpy(state: Mapping[str, Tensor]) -> Iterator[tuple[str, NDArray[Any]]]:
    for key, tensor in state.items():
        if not hasattr(tensor, "detach"):
            continue  # from get_extra_state
        tensor = tensor.detach().cpu()
        yield key, (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def names(folder: Path, rank: int, name: str) -> list[str]:
    """Returns the names of the tensors that `rank` wrote under `name`."""
    with _reading(folder, rank, name) as file:
        return [member.removeprefix(PREFIX).removeprefix(PACKED) for member in file.files]


def read_arrays(folder: Path, rank: int, name: str) -> dict[str, NDArray[Any]]:
    """Returns the tensors that `rank` wrote under `name`. Raises TrainingFailed for a file that cannot be read."""
    return dict(_read(folder, rank, name, names(folder, rank, name)))


def read_array(folder: Path, rank: int, name: str, tensor: str) -> NDArray[Any]:
    """Returns one of these tensors, without reading the others."""
    ((_, array),) = _read(folder, rank, name, [tensor])
    return array


def _read(folder: Path, rank: int, name: str, tensors: Iterable[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    from samestep.records.packed import near_name, unpack

    with _reading(folder, rank, name) as file:
        for tensor in tensors:
            if PREFIX + tensor in file.files:
                yield tensor, file[PREFIX + tensor]
                continue
            packed = file[PACKED + tensor]
            near = near_name(packed)
            yield tensor, unpack(packed, read_array(folder, rank, near, tensor) if near else None)


@contextmanager
def _reading(folder: Path, rank: int, name: str) -> Iterator[Any]:
    """Opens the file of a state. Turns the errors of one that is cut short or missing into TrainingFailed."""
    import numpy as np

    path = _path(folder, rank, name)
    try:
        with np.load(path) as file:
            yield file
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise TrainingFailed(f"{path} is missing or incomplete ({error}); give another folder with --out") from None


def _path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank{rank}.{name}.npz"
