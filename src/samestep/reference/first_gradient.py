"""Samples of the first step's gradient in its parts, from which the judge names the cause of a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

ELEMENTS = 1 << 16  # at most so many of a tensor: every n-th

Sample = list[Tensor | None]  # of each trained parameter, flat; None where it has no gradient


def sample(parameters: Sequence[nn.Parameter]) -> Sample:
    """Every n-th element of the gradients, n such that no tensor has more than ELEMENTS."""
    return [None if p.grad is None else thinned(p.grad) for p in parameters]


def thinned(tensor: Tensor) -> Tensor:
    """Every n-th element, flat, n such that there are no more than ELEMENTS."""
    return tensor.detach().reshape(-1)[:: max(1, ceil(tensor.numel() / ELEMENTS))].clone()


def present(names: Sequence[str], gradient: Sample) -> dict[str, Tensor]:
    """The sampled gradients by their parameters' names, without those that are None."""
    return {name: g for name, g in zip(names, gradient) if g is not None}


@dataclass
class FirstGradient:
    """The gradient of the first step, part by part.

    parts: (replica, micro-batch) -> its part of the sum that becomes the gradient. replicas: how many.
    """

    replicas: int
    parts: dict[tuple[int, int], Sample]

    def add(self, replica: int, micro: int, before: Sample, after: Sample) -> None:
        """Notes a part. before, after: samples of the sum, without it and with it."""
        part = [new if old is None or new is None else new - old for old, new in zip(before, after, strict=True)]
        of_phases = self.parts.get((replica, micro), [None] * len(part))  # each phase trains its own parameters
        self.parts[replica, micro] = [old if new is None else new for old, new in zip(of_phases, part, strict=True)]

    def own(self) -> Sample:
        """Replica 0's own gradient."""
        return _summed([part for (replica, _), part in sorted(self.parts.items()) if replica == 0])

    def own_before_last(self) -> Sample:
        """Replica 0's own gradient without the last micro-batch; empty where there is but one."""
        return _summed([part for place, part in self._before_last() if place[0] == 0])

    def before_last(self) -> Sample:
        """The mean over the replicas without the last micro-batch; empty where there is but one."""
        total = _summed([part for _, part in self._before_last()])
        return [None if gradient is None else gradient / self.replicas for gradient in total]

    def _before_last(self) -> list[tuple[tuple[int, int], Sample]]:
        last = max((micro for _, micro in self.parts), default=0)
        return [(place, part) for place, part in sorted(self.parts.items()) if place[1] < last]


def _summed(samples: list[Sample]) -> Sample:
    sums: Sample = []
    for parts in zip(*samples):
        given = [part for part in parts if part is not None]
        sums.append(torch.stack(given).sum(0) if given else None)
    return sums
