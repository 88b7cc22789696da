"""Weights as files: safetensors, written whole or not at all, and read strictly."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.errors import UserError, first_few


def save(state: Mapping[str, Any], file: Path) -> None:
    """Writes a state dict as safetensors; the file is there whole or not at all."""
    from safetensors.torch import save_file

    beside = file.with_name(f".{file.name}")
    # Cloned, because the format takes no two names for one memory (tied weights).
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if isinstance(t, Tensor)}
    save_file(tensors, beside)
    os.replace(beside, file)


def model_with_weights(model: Callable[[], nn.Module], file: Path) -> nn.Module:
    """What `model()` builds, with the weights in `file`, which must have every tensor of it and no other.

    Raises UserError that names what does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); give weights that a run left") from error
    built = model()
    wanted = {name: value for name, value in built.state_dict().items() if isinstance(value, Tensor)}
    absent, odd = sorted({*wanted} - {*given}), sorted({*given} - {*wanted})
    if absent or odd:
        said = [f"it has no {first_few(absent)}"] if absent else []
        said += [f"the model has no {first_few(odd)}"] if odd else []
        raise UserError(f"{file} is not of this job's model: {' and '.join(said)}; give the settings it was made with")
    for name, value in wanted.items():
        if value.shape != given[name].shape:
            there, here = list(given[name].shape), list(value.shape)
            raise UserError(
                f"{file} is not of this job's model: {name} is {there} there and {here} here; give the settings it was "
                "made with"
            )
    for name, value in wanted.items():
        if value.dtype != given[name].dtype:
            raise UserError(
                f"{file} is not of this job's model: {name} is {given[name].dtype} there and {value.dtype} here; save "
                "it as that"
            )
    built.load_state_dict({**built.state_dict(), **given})
    return built
