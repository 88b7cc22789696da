"""Reads and writes the tensors of a record: `rankR.NAME.npz` in the launch folder, named as in the state dict."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, BadZipFile

from samestep.errors import TrainingFailed, printable
from samestep.records.files import replace_by
from samestep.world.regular_files import check_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Arrays = Mapping[str, NDArray[np.generic]]

PREFIX = "tensor "  # so that no tensor's name is an argument of numpy.savez
PACKED = "packed "  # the prefix of the names of tensors that packed.py has made smaller
# What a damaged file raises, in numpy, zipfile and json: a record may be anybody's.
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, BadZipFile, zlib.error, struct.error, ValueError, TypeError)
DAMAGE += (AttributeError, LookupError, NotImplementedError, MemoryError, ArithmeticError, RecursionError)
NAME = re.compile(r"[\w. -]+")  # the name of a state, which is a part of a file's name


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
    from samestep.records.packed import is_held, pack

    arrays: dict[str, NDArray[Any]] = {}
    with StateFile(folder, rank, near) if near else nullcontext[Mapping[str, Any]]({}) as close:
        for key, array in _numpy(state):
            if array.dtype.kind != "f":
                arrays[PREFIX + key] = array
                continue
            neighbour = close.get(key)
            alike = neighbour is not None and neighbour.shape == array.shape
            packed = pack(array, neighbour if alike else None, near if alike else "")
            if alike or is_held(array.nbytes, packed):
                arrays[PACKED + key] = packed
            else:
                arrays[PREFIX + key] = array
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


def read_arrays(folder: Path, rank: int, name: str) -> dict[str, NDArray[Any]]:
    """Returns the tensors that `rank` wrote under `name`. Raises TrainingFailed for a file that cannot be read."""
    with StateFile(folder, rank, name) as state:
        return dict(state)


class StateFile(Mapping[str, "NDArray[Any]"]):
    """The tensors that a rank wrote under a name. One is read when it is asked for; the file is opened once for all.

    Raises TrainingFailed for a file that is missing or cut short.
    """

    def __init__(self, folder: Path, rank: int, name: str, within: tuple[str, ...] = ()) -> None:
        """Opens the file. within: the states whose differences from this one are being read."""
        import numpy as np

        self._folder, self._rank, self._path = folder, rank, _path(folder, rank, name)
        self._within = (*within, name)
        self._near: dict[str, StateFile] = {}  # the states that packed tensors are differences from
        with self._readable():
            if name in within or not NAME.fullmatch(name):
                raise ValueError(f"{name} is no state beside it")
            check_regular(self._path)
            self._file = np.load(self._path, allow_pickle=False)
            names = self._file.files
            if sum(member.file_size for member in self._file.zip.infolist()) > self._path.stat().st_size:
                raise ValueError("it claims more bytes than it has")
        members = ((PREFIX, member) if member.startswith(PREFIX) else (PACKED, member) for member in names)
        self._members = {member.removeprefix(prefix): member for prefix, member in members}

    def __getitem__(self, tensor: str) -> NDArray[Any]:
        from samestep.records.packed import near_name, unpack

        member = self._members[tensor]
        with self._readable():
            array = self._array(member)
            if member.startswith(PREFIX):
                return array
            near = near_name(array)
            if near and near not in self._near:
                self._near[near] = StateFile(self._folder, self._rank, near, self._within)
            return unpack(array, self._near[near][tensor] if near else None)

    def _array(self, member: str) -> NDArray[Any]:
        """Returns an array as it is stored: what is compressed could be larger than the memory."""
        if self._file.zip.getinfo(f"{member}.npy").compress_type != ZIP_STORED:
            raise ValueError(f"{member} is compressed, which samestep never writes")
        array = self._file[member]
        # numpy returns the bytes of what is no array; of elements without bytes a file may claim any number.
        if not hasattr(array, "dtype") or not array.dtype.itemsize:
            raise ValueError(f"{member} is no array")
        return array  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, and those that it needed."""
        for state in self._near.values():
            state.close()
        self._file.close()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except DAMAGE as error:
            why = printable(error, 300)
            raise TrainingFailed(
                f"{self._path} is missing or incomplete ({why}); give another folder with --out"
            ) from None


def _path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank{rank}.{name}.npz"
