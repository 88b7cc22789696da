"""Reads and writes the tensors of a record: `rankR.NAME.npz` in the launch folder, named as in the state dict."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
    with StateFile(folder, rank, near) if near else nullcontext[Mapping[str, Any]]({}) as close:
        for key, array in _numpy(state):
            if array.dtype.kind != "f":
                arrays[PREFIX + key] = array
                continue
            neighbour = close.get(key)
            alike = neighbour is not None and neighbour.shape == array.shape
            arrays[PACKED + key] = pack(array, neighbour if alike else None, near if alike else "")
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

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        import numpy as np

        self._folder, self._rank, self._path = folder, rank, _path(folder, rank, name)
        self._near: dict[str, StateFile] = {}  # the states that packed tensors are differences from
        with self._readable():
            self._file = np.load(self._path)
        members = ((PREFIX, member) if member.startswith(PREFIX) else (PACKED, member) for member in self._file.files)
        self._members = {member.removeprefix(prefix): member for prefix, member in members}

    def __getitem__(self, tensor: str) -> NDArray[Any]:
        from samestep.records.packed import near_name, unpack

        member = self._members[tensor]
        with self._readable():
            array: NDArray[Any] = self._file[member]
            if member.startswith(PREFIX):
                return array
            near = near_name(array)
            if near and near not in self._near:
                self._near[near] = StateFile(self._folder, self._rank, near)
            return unpack(array, self._near[near][tensor] if near else None)

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
        except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise TrainingFailed(
                f"{self._path} is missing or incomplete ({error}); give another folder with --out"
            ) from None


def _path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank{rank}.{name}.npz"
