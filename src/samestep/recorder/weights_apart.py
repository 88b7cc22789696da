"""The weights of a rank that steps with its own gradients: after each step, and where the script writes others before
the next one, as ranks do that step apart and then bring their weights together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.bounds import REDUCED_APART
from samestep.recorder.parameters import Parameters
from samestep.recorder.window import Window, compress
from samestep.records.script import AFTER, BEFORE, OUTER_GRADIENT, OUTER_WEIGHTS


class WeightsApart:
    """Takes sums of the weights while the rank steps with its own gradients. Where others are reduced it takes none.

    is_own: whether the present step's gradients are the rank's own. begun: the digests of the weights with which the
    present step begins, and of the buffers, where weights are not those that the step before has left.
    """

    def __init__(self, parameters: Parameters, is_recorded: bool) -> None:
        self._parameters, self._is_recorded = parameters, is_recorded
        self.is_own = False
        self.begun: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}
        self._buffers: dict[str, int] | None = None  # digests before the first training forward of the step

    def begin_forward(self) -> None:
        """Notes the buffers, which the forward pass may move."""
        if self.is_own and self._buffers is None:
            self._buffers = self._parameters.buffers()

    def begin_step(self) -> None:
        """Sees whether the script has written other weights since the step before."""
        self._sums = {}
        self.begun = self._parameters.changed_since_step() if self.is_own else {}
        if self.begun:
            self.begun |= self._buffers or {}
            self._take(BEFORE)

    def take(self, window: Window, taken: Mapping[str, Tensor]) -> None:
        """Sees whether a step's gradients are the rank's own. taken: parameter -> the gradient of the optimizer."""
        was_own, own = self.is_own, self._is_recorded and is_own(window, taken)
        # An outer optimizer's gradients come from no backward pass.
        self.is_own = was_own if own is None else own
        if self.is_own and not was_own:
            self._take(BEFORE)

    def end_step(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """Returns the step's sums, by their names in its file. optimizers: all that have stepped so far."""
        self._buffers = None
        if self.is_own:
            self._take(AFTER)
            self._sums |= self._outer_step(optimizer, max(map(self._parameters.held_by, optimizers), key=len))
        return self._sums

    def _take(self, kind: str) -> None:
        self._sums |= {kind.format(name): sums for name, sums in self._parameters.sums().items()}

    def _outer_step(self, optimizer: Optimizer, trained: list[str]) -> dict[str, Tensor]:
        """Returns the gradients and the weights of an optimizer that holds copies of the trained parameters.

        trained: the names of these, in the order of the inner optimizer's groups.
        """
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        shapes = [self._parameters.by_name[name].shape for name in trained]
        if self._parameters.held_by(optimizer) or [tensor.shape for tensor in held] != shapes:
            return {}
        sums = {OUTER_WEIGHTS.format(name): compress(tensor) for name, tensor in zip(trained, held)}
        gradients = {name: tensor.grad for name, tensor in zip(trained, held) if tensor.grad is not None}
        return sums | {OUTER_GRADIENT.format(name): compress(gradient) for name, gradient in gradients.items()}


def is_own(window: Window, taken: Mapping[str, Tensor]) -> bool | None:
    """Returns whether a step's gradients are what this rank has computed, or a multiple of that, as where it clips it;
    None where it has computed none. The first parameter tells."""
    for name, of_micro_batches in window.local.items():
        computed = torch.stack([*of_micro_batches.values()]).sum(0)
        size = computed.norm()
        if name not in taken or computed.numel() < 2 or not size > 0:
            continue
        gradient = window.unclipped.get(name, taken[name])
        factor = gradient @ computed / size**2
        return bool((factor > 0) & ((gradient - factor * computed).norm() <= REDUCED_APART * factor * size))
    return None
