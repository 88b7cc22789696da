"""Exports trained weights as a folder that from_pretrained loads (run --export)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from samestep.errors import UserError
from samestep.rank.weights import model_with_weights
from samestep.records.exported import other_file, write_list
from samestep.records.results import RunResults, read_results
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, heartbeat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        save_pretrained(str(part))
        write_list(part)
        if _is_of_this_training(folder, weights.parent) and not other_file(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)  # an error where somebody has put files there
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"--export {folder}: {type(module).__name__}.save_pretrained failed: {type(error).__name__}: {error}; the "
            f"trained weights are in {weights}"
        ) from error


def _is_of_this_training(folder: Path, out: Path) -> bool:
    """Whether the training in `out` has exported to this folder before it was continued."""
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
