"""Notes what the modules of a model return in forward passes, to compare them between ranks and one process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.job.phases import CHECKPOINTED
from samestep.job.walk import leaves_of

if TYPE_CHECKING:  # importing samestep must not import torch
    from torch import Tensor, nn

MOST = 1 << 25  # elements in all, which are 256 MiB; where there are more, nothing is noted


class ModuleOutputs:
    """What each module of a model has returned, in the order in which they return first; of a rank, its part of it."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[Tensor]] = {}
        self._elements = 0

    def begin(self, model: nn.Module) -> None:
        """Watches a model. Called after an engine has put its own hooks on it: they change what is returned."""
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._note, name.replace(CHECKPOINTED, "")))

    def _note(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        from torch import Tensor, is_grad_enabled

        if not is_grad_enabled():
            return  # an evaluation
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta:
                local: Tensor = getattr(leaf, "_local_tensor", leaf).detach()
                if not local.any():
                    continue  # what an expert returns in the first of its router's two passes, of nothing computed
                self._elements += local.numel()
                if self._elements <= MOST:
                    self._outputs.setdefault(name, []).append(local.cpu().double().flatten())

    def values(self) -> dict[str, Tensor]:
        """Returns module -> the values of all its outputs, in ascending order: parts are compared in no other."""
        import torch

        if self._elements > MOST:
            return {}
        return {name: torch.cat(outputs).sort().values for name, outputs in self._outputs.items()}
