"""Record: what a run did, as files. A rank writes `rankR.json` and `rankR.NAME.npz`; the parent reads them.

JSON holds what was observed, npz the tensors. A file appears whole or not at all: it is written beside its place,
forced to the disk and renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Arrays = Mapping[str, NDArray[np.generic]]

SCHEMA = 1
PROGRESS = "progress.json"
ENVIRONMENT = "environment-of-rank0.json"  # the values of the variables that a launcher wants to know
TOLD = "SAMESTEP_TELL"  # the environment's name for their names
PREFIX = "tensor "  # so that no tensor's name is one of numpy.savez's own arguments


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path`, whole or not at all."""
    _replace(path, json.dumps(value).encode())


def finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not know: not a number, and infinite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all."""
    _replace(path, text.encode())


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Writes one array to `path` (.npy), whole or not at all."""
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array)
    _replace(path, buffer.getvalue())


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes named arrays to `path` (.npz), whole or not at all."""
    import io

    import numpy as np

    buffer = io.BytesIO()
    named = {PREFIX + name: array for name, array in arrays.items()}
    np.savez(buffer, **named)  # type: ignore[arg-type]  # its stub takes the names for its own options
    _replace(path, buffer.getvalue())


def write_state(folder: Path, rank: int, name: str, state: Mapping[str, Tensor]) -> None:
    """A state dict as rank's arrays, which `Record.arrays(name)` reads. numpy knows no bfloat16: it becomes float32."""
    arrays = {}
    for key, tensor in state.items():
        if not hasattr(tensor, "detach"):
            continue  # what get_extra_state returned
        tensor = tensor.detach().cpu()
        arrays[key] = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    write_arrays(folder / f"rank{rank}.{name}.npz", arrays)


def tell(rank: int, folder: Path, phase: str, **more: Any) -> None:
    """What the launch does now, for whoever watches; rank 0 speaks for all."""
    if rank == 0:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        write_json(folder / PROGRESS, {"phase": phase, "attempt": attempt, **more})


def told(folder: Path) -> dict[str, Any]:
    """What the launch in `folder` last told."""
    try:
        progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
    except FileNotFoundError:
        return {"phase": "starting"}
    return progress


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


@dataclass(frozen=True)
class Record:
    """The folder of one launch. `ranks`: what each rank wrote, in rank order; empty before they have ended."""

    folder: Path

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("rank[0-9]*.json"), key=lambda p: int(p.stem.removeprefix("rank")))
        return [json.loads(file.read_text()) for file in files]

    def plan(self) -> dict[str, Any]:
        """What the launch was asked to do."""
        plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return plan

    def complete(self, size: int) -> bool:
        """Whether all `size` ranks wrote their part, in this schema."""
        return len(self.ranks) == size and all(rank["schema"] == SCHEMA for rank in self.ranks)

    def error(self) -> dict[str, Any] | None:
        """The error that came first, as {rank, kind, message, traceback, time}; None when no rank wrote one.

        The others' errors mostly say that the first rank has left.
        """
        errors = [json.loads(file.read_text()) for file in self.folder.glob("error-rank*.json")]
        return min(errors, key=lambda e: (e["lost_peer"], e["time"]), default=None)

    def training(self, name: str) -> list[dict[str, Any]]:
        """What each rank observed in one training."""
        return [rank["trainings"][name] for rank in self.ranks]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors that `rank` wrote under `name`."""
        import numpy as np

        with np.load(self.folder / f"rank{rank}.{name}.npz") as file:
            return {name.removeprefix(PREFIX): array for name, array in file.items()}
