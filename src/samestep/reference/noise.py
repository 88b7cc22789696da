"""Noise of the size of rounding: shows how far a training moves when every value moves by its last place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.job.walk import mapped_tensors

AT_ONCE = 1 << 20  # elements; the threads meet after each operation on them, which takes long on a busy machine


class Noise:
    """Moves every value by up to one unit in the last place of `dtype`.

    of_data: the dtype of the rows and of the first weights, where the gradients alone are rounded to `dtype`.

    reverses: whether the rows come in reverse. Not where the model draws random numbers, because dropout would hit
    others, nor where the criterion depends on the rows' order.
    rounds_weights: whether weights are perturbed after each step too, as those are that are kept in `dtype`.
    shakes_data: whether the rows' values are moved too; not where the criterion then refuses them.
    scales: whether losses are multiplied, and gradients divided again; not where gradients do not follow the loss.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        seed: int,
        reverses: bool,
        rounds_weights: bool = False,
        shakes_data: bool = True,
        scales: bool = True,
        of_data: torch.dtype | None = None,
    ) -> None:
        self.eps, self.reverses, self.rounds_weights = torch.finfo(dtype).eps, reverses, rounds_weights
        self.shakes_data, self.eps_of_data = shakes_data, torch.finfo(of_data or dtype).eps
        # 3 or 5: engines scale losses by the ranks and gradients back, which rounds.
        self.scale = 1.0 + 2 * seed if scales else 1.0
        self.generator = torch.Generator().manual_seed(seed)

    def _factors(self, tensor: Tensor, eps: float) -> Tensor:
        unit = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=self.generator)
        return unit.mul_(eps).add_(1).to(tensor.device, tensor.dtype)

    def perturb(self, tensors: Iterable[Tensor], *, data: bool = False) -> None:
        """Moves tensors in place, a part after the other. data: as far as the rows' values, as the first weights."""
        with torch.no_grad():
            for tensor in tensors:
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                for part in tensor.view(-1).split(AT_ONCE) if tensor.is_contiguous() else (tensor,):
                    part.mul_(self._factors(part, self.eps_of_data if data else self.eps))

    def perturbed(self, data: Any) -> Any:
        """A copy of `data` with its floating-point values moved, but not beyond the smallest and the largest: a
        criterion may refuse values outside of its domain, such as a probability above 1."""
        if not self.shakes_data:
            return data

        def moved(tensor: Tensor) -> Tensor:
            finite = tensor.isfinite() if tensor.is_floating_point() and tensor.layout == torch.strided else None
            if finite is None or not finite.any():
                return tensor
            inside = tensor[finite]
            return torch.where(
                finite, (tensor * self._factors(tensor, self.eps_of_data)).clamp(inside.min(), inside.max()), tensor
            )

        return mapped_tensors(moved, data)
