"""Compresses gradients into few sums, of which the mean over ranks is that of the whole gradients."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from samestep.records.script import BUCKETS

PERIOD = 65537  # prime, so that no two elements of a bucket have the same sign throughout


@cache
def _signs(device: torch.device) -> Tensor:
    """Returns PERIOD random signs, the same on every rank."""
    generator = torch.Generator().manual_seed(20251123)
    return (torch.randint(0, 2, (PERIOD,), generator=generator) * 2 - 1).double().to(device)


def placed(part: Tensor, size: int, start: int, length: int) -> Tensor:
    """Returns `size` zeros, with the first `length` elements of a part from `start` on."""
    whole = torch.zeros(size, dtype=part.dtype, device=part.device)
    whole[start : start + length] = part.detach().reshape(-1)[:length]
    return whole


def compress(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements where it has BUCKETS or fewer; otherwise BUCKETS sums of them, with random signs.

    The result is linear in the tensor, in float64, of shape [min(elements, BUCKETS)], on the tensor's device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_sparse:
        flat = flat.to_dense()
    flat = flat.double()
    count = flat.numel()
    if count <= BUCKETS:
        return flat.clone()
    signs = _signs(flat.device).repeat(-(-count // PERIOD))[:count]
    padding = -count % BUCKETS
    return torch.nn.functional.pad(flat * signs, (0, padding)).view(-1, BUCKETS).sum(0)
