"""Notes what the modules of a model return in forward passes, to compare them between ranks and one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.job.phases import CHECKPOINTED
from samestep.job.walk import leaves_of

if TYPE_CHECKING:  # importing samestep must not import torch
    from torch import Tensor, nn

MOST = 1 << 25  # elements in all, which are 256 MiB; where there are more, nothing is noted
ZEROS = "zeros of "  # before the name of a module: how many values its outputs have that are zeros alone
LATER_CALL = " at call "  # and its number: after the name of a module that a forward pass calls again


class ModuleOutputs:
    """What each module of a model has returned, in the order in which they return first; of a rank, its part of it."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[Tensor]] = {}
        self._zeros = Counter[str]()  # values of outputs that are zeros alone
        self._calls = Counter[str]()  # of each module in this forward pass of the model
        self._elements = 0

    def begin(self, model: nn.Module) -> None:
        """Watches a model. Called after an engine has put its own hooks on it: they change what is returned."""
        model.register_forward_pre_hook(lambda *_: self._calls.clear())
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._note, name.replace(CHECKPOINTED, "")))

    def _note(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        from torch import is_grad_enabled

        if not is_grad_enabled():
            return  # as in an evaluation
        parts = [local for leaf in leaves_of(output) if (local := _local(leaf)) is not None]
        # Zeros are counted apart, and as no call: an expert returns them in the first of its router's two passes.
        noted = [local for local in parts if local.any()]
        self._zeros[name] += sum(local.numel() for local in parts) - sum(local.numel() for local in noted)
        if not noted:
            return
        self._calls[name] += 1
        self._elements += sum(local.numel() for local in noted)
        if self._elements <= MOST:
            call = name if self._calls[name] == 1 else f"{name}{LATER_CALL}{self._calls[name]}"
            self._outputs.setdefault(call, []).extend(local.cpu().double().flatten() for local in noted)

    def values(self) -> dict[str, Tensor]:
        """Returns module -> the values of all its outputs, in ascending order: parts are compared in no other."""
        import torch

        if self._elements > MOST:
            return {}
        zeros = {f"{ZEROS}{name}": torch.tensor([count]) for name, count in self._zeros.items() if count}
        return {name: torch.cat(outputs).sort().values for name, outputs in self._outputs.items()} | zeros


def _local(leaf: Any) -> Tensor | None:
    """Returns this rank's part of a tensor of numbers; None for others."""
    from torch import Tensor

    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.is_meta:
        return None
    local: Tensor = getattr(leaf, "_local_tensor", leaf).detach()
    return local
