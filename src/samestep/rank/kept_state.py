"""Keeps a model's buffers and hidden state from a forward pass that is not to change them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def keep_state(model: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the model's buffers and what it keeps in attributes, as a hidden state: a rank
    without rows computes others' rows, and must not change these."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    attributes = [
        (vars(module), name, list(value) if isinstance(value, list) else value)
        for module in model.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, Tensor | tuple | list)
    ]

    def restore() -> None:
        for buffer, value in buffers:
            buffer.data.copy_(value)  # .data: autograd may hold the buffer
        for of_module, name, kept in attributes:
            if isinstance(of_module.get(name), Tensor | tuple | list):
                of_module[name] = kept

    return restore
