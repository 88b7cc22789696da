"""The weights: saved and loaded as safetensors files, averaged (Job.ema), exported as from_pretrained loads them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError, first_few, printable
from samestep.job.phases import CHECKPOINTED
from samestep.rank.shards import StateDict as StateDict
from samestep.rank.shards import block_of
from samestep.records.checkpoint import other_file, write_list
from samestep.records.results import read_results
from samestep.records.run_results import RunResults
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, heartbeat
from samestep.world.regular_files import (
    check_regular,
    make_named_folder,
    move_file,
    move_folder,
    new_folder,
    open_new,
    remove_file,
    remove_made_folder,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PART = {"samestep": "trainable"}  # the metadata of a file that holds the trainable part of the weights


def trainable(model: nn.Module) -> frozenset[str]:
    """Returns the names of the trainable parameters, and of the buffers of the modules that hold one."""
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        trained = {
            name for name, p in module.named_parameters(recurse=False, remove_duplicate=False) if p.requires_grad
        }
        trained |= {name for name, _ in module.named_buffers(recurse=False)} if trained else set()
        names |= {f"{path}.{name}" if path else name for name in trained}
    return frozenset(names)


def save(state: Mapping[str, Any], file: Path, names: frozenset[str] | None = None) -> None:
    """Writes the tensors of a state dict as safetensors, atomically. names: those to write; None: all of them.

    The folder is created where it is missing. Raises UserError, which names the disk, where the file cannot be written.
    """
    from safetensors import SafetensorError

    heartbeat.begin(CHECKPOINT)
    temporary = file.with_name(f".{file.name}")
    try:
        make_named_folder(file.parent)
        _write(state, temporary, names)
        move_file(temporary, file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            remove_file(temporary)
        raise UserError(f"{file} cannot be written ({_reason(error)}; {_room(file.parent, state)})") from error


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    # The sentence of safetensors is longer.
    return "No space left on device" if "No space left on device" in text else text


def _room(folder: Path, state: Mapping[str, Any]) -> str:
    """Returns the free bytes of the folder's disk, and the bytes that the tensors need."""
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
            is_complete = (opened.metadata() or {}).get("samestep") != PART["samestep"]
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({printable(error, 300)}); give the weights.safetensors of a run"
        ) from error
    built = model()
    expected = {name: value for name, value in built.state_dict().items() if isinstance(value, Tensor)}
    if not is_complete:
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
            saved_shape, shape = list(loaded[name].shape), list(value.shape)
            raise UserError(
                f"{file} does not fit this job's model: {name} has shape {saved_shape} in the file and "
                f"{shape} in the model; give the settings it was made with"
            )
    for name, value in expected.items():
        if value.dtype != loaded[name].dtype:
            raise UserError(
                f"{file} does not fit this job's model: {name} is {loaded[name].dtype} in the file and {value.dtype} "
                "in the model; save it in that dtype"
            )
    built.load_state_dict({**built.state_dict(), **loaded})
    return built


class Ema:
    """The average of the trained parameters: average = decay * average + (1 - decay) * parameter, after each step.

    Of a job with phases, a phase's step moves the averages of that phase's parameters.
    Begins with the parameters as they are. A sharded parameter's average is sharded as it is, and needs no collective.
    Buffers, such as BatchNorm's statistics, are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._averages = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """Returns the parameters' values on this rank, read anew each time: a library may give a parameter other
        memory."""
        return [block_of(parameter) for parameter in self._parameters]

    def named(self, model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Yields the name of each averaged parameter, its average on this rank, and the parameter."""
        averages = {id(parameter): average for parameter, average in zip(self._parameters, self._averages)}
        for name, parameter in model.named_parameters():
            if id(parameter) in averages:
                yield name.replace(CHECKPOINTED, ""), averages[id(parameter)], parameter

    def update(self) -> None:
        """Takes in the parameters. Call it after each optimizer step."""
        moved = [
            pair
            for pair, parameter in zip(zip(self._averages, self._tensors()), self._parameters)
            if parameter.requires_grad  # the phase's that has stepped
        ]
        with torch.no_grad():
            torch._foreach_lerp_([average for average, _ in moved], [new for _, new in moved], 1 - self.decay)

    def swap(self) -> None:
        """Exchanges the parameters and their averages."""
        with torch.no_grad():
            for parameter, average in zip(self._tensors(), self._averages):
                value = parameter.clone()
                parameter.copy_(average)
                average.copy_(value)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the averages while the block runs."""
        self.swap()
        yield
        self.swap()


POLL_S = 0.2  # between two looks of the other ranks


def pretrained(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost modules that have `save_pretrained`, by name: '' for the model itself."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{outer}.") or not outer for outer in modules)
        if not within and callable(getattr(module, "save_pretrained", None)):
            modules[name] = module
    return modules


def export(model: Callable[[], nn.Module], weights: Path, folder: Path) -> None:
    """Writes the folder that from_pretrained loads, of `model()` with the weights in the file `weights`.

    It is written beside `folder` and renamed, so that a folder of that name is complete. Raises UserError when it
    cannot be written.
    """
    (module,) = pretrained(model_with_weights(model, weights)).values()
    save_pretrained: Any = module.save_pretrained
    made = new_folder(folder.parent, f".{folder.name}.")
    part = made / folder.name  # with the permissions that a folder has here
    try:
        save_pretrained(str(part))
        write_list(part)
        if _is_of_this_training(folder, weights.parent) and not other_file(folder):
            remove_made_folder(folder)
        move_folder(part, folder)  # raises an error where other files are in it
    except Exception as error:
        raise UserError(
            f"--export {folder}: {type(module).__name__}.save_pretrained failed: {type(error).__name__}: {error}; the "
            f"trained weights are in {weights}"
        ) from error
    finally:
        remove_made_folder(made)


def _is_of_this_training(folder: Path, out: Path) -> bool:
    """Returns whether the training in `out` has exported to this folder before it was continued."""
    try:
        return read_results(RunResults, out).export == str(folder)
    except (OSError, UserError):
        return False


def on_first(do: Callable[[], None], world: World, store: Store | None) -> None:
    """Calls `do` on rank 0. The other ranks return when it has ended.

    They ask the store, because a collective would time out, and a launcher may end rank 0 soon after the others' end.
    """
    heartbeat.begin(CHECKPOINT)
    if world.rank == 0:
        try:
            do()
        finally:
            if store is not None:
                store.set("exported", "")
    elif store is not None:
        while not store.check(["exported"]):
            time.sleep(POLL_S)
