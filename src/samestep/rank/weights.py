"""Saves and loads weights as safetensors files: written atomically, loaded strictly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.errors import UserError, first_few, printable
from samestep.world.heartbeat import CHECKPOINT, heartbeat
from samestep.world.regular_files import check_regular, open_new

StateDict = dict[str, Any]  # what a state_dict() returns: tensors and plain values by name
PART = {"samestep": "trainable"}  # the metadata of a file that holds the trainable part of the weights


def trainable(model: nn.Module) -> frozenset[str]:
    """Returns the names of the trainable parameters, and of the buffers of the modules that hold one."""
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        own = {name for name, p in module.named_parameters(recurse=False, remove_duplicate=False) if p.requires_grad}
        own |= {name for name, _ in module.named_buffers(recurse=False)} if own else set()
        names |= {f"{path}.{name}" if path else name for name in own}
    return frozenset(names)


def save(state: Mapping[str, Any], file: Path, names: frozenset[str] | None = None) -> None:
    """Writes the tensors of a state dict as safetensors, atomically. names: those to write; None: all of them.

    The folder is created where it is missing. Raises UserError, which names the disk, where the file cannot be written.
    """
    from safetensors import SafetensorError

    heartbeat.begin(CHECKPOINT)
    temporary = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(state, temporary, names)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"{file} cannot be written ({_reason(error)}; {_room(file.parent, state)})") from error


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return "No space left on device" if "No space left on device" in text else text  # safetensors' own is longer


def _room(folder: Path, state: Mapping[str, Any]) -> str:
    """Returns what the folder's disk has free, and what the tensors need."""
    need = sum(tensor.numel() * tensor.element_size() for tensor in state.values() if isinstance(tensor, Tensor))
    disk = folder.resolve()
    while not (disk.exists() and os.path.ismount(disk)) and disk != disk.parent:
        disk = disk.parent
    return (
        f"the disk at {disk} has {shutil.disk_usage(disk).free / 1e6:,.1f} MB free, the tensors are {need / 1e6:,.1f}"
    )


def _write(state: Mapping[str, Any], temporary: Path, names: frozenset[str] | None) -> None:
    from safetensors.torch import save_file

    # Cloned, because the format does not allow two names for one tensor (tied weights).
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if isinstance(t, Tensor)}
    with open_new(temporary) as empty:
        mode = os.stat(empty.fileno()).st_mode  # as the umask says; save_file's is for the owner alone
    if names is None:
        save_file(tensors, temporary)
    else:
        save_file({name: tensor for name, tensor in tensors.items() if name in names}, temporary, PART)
    os.chmod(temporary, mode)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())


def model_with_weights(model: Callable[[], nn.Module], file: Path) -> nn.Module:
    """Builds `model()` and loads the weights in `file`, which must hold exactly its tensors, or its trainable part.

    Raises UserError that names the tensors that are missing, unknown, or of another shape or dtype.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        check_regular(file)
        loaded = load_file(file)
        with safe_open(file, "pt") as opened:
            whole = (opened.metadata() or {}).get("samestep") != PART["samestep"]
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({printable(error, 300)}); give the weights.safetensors of a run"
        ) from error
    built = model()
    expected = {name: value for name, value in built.state_dict().items() if isinstance(value, Tensor)}
    if not whole:
        expected = {name: value for name, value in expected.items() if name in trainable(built)}
    missing, unknown = sorted({*expected} - {*loaded}), sorted({*loaded} - {*expected})
    if missing or unknown:
        reasons = [f"it has no {first_few(missing)}"] if missing else []
        reasons += [f"the model has no {first_few(unknown)}"] if unknown else []
        raise UserError(
            f"{file} does not fit this job's model: {' and '.join(reasons)}; give the settings it was made with"
        )
    for name, value in expected.items():
        if value.shape != loaded[name].shape:
            there, here = list(loaded[name].shape), list(value.shape)
            raise UserError(
                f"{file} does not fit this job's model: {name} has shape {there} in the file and {here} in the model; "
                "give the settings it was made with"
            )
    for name, value in expected.items():
        if value.dtype != loaded[name].dtype:
            raise UserError(
                f"{file} does not fit this job's model: {name} is {loaded[name].dtype} in the file and {value.dtype} "
                "in the model; save it in that dtype"
            )
    built.load_state_dict({**built.state_dict(), **loaded})
    return built
