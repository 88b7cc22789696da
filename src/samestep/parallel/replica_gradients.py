"""Gradients of replicas whose ranks divide the model, averaged and clipped by hand: DDP takes neither DTensors nor
stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from samestep.rank.shards import block_of, is_shard


def average_gradients(parameters: Iterable[nn.Parameter], replicas: dist.ProcessGroup) -> None:
    """Averages the gradients over the ranks that have the same part of the model in each replica."""
    if replicas.size() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    fill_missing_gradients(trained, replicas)
    for parameter in trained:
        if parameter.grad is not None:
            gradient = block_of(parameter.grad)
            dist.all_reduce(gradient, group=replicas)
            gradient /= replicas.size()


def fill_missing_gradients(trained: Sequence[nn.Parameter], replicas: dist.ProcessGroup) -> None:
    """Gives each parameter a gradient of zeros where another replica has one, as where data decide which modules are
    called; else the replicas would call different all-reduces. What has no gradient on any replica keeps none."""
    if not trained:
        return
    device = next((p.device for p in trained if not p.is_meta), torch.device("cpu"))
    given = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=device)
    dist.all_reduce(given, dist.ReduceOp.MAX, group=replicas)
    for parameter, is_given in zip(trained, given.tolist()):
        if is_given and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clip_divided_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    counted: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    device: str,
) -> None:
    """Clips by the norm of the whole gradient, which the ranks of a group divide.

    parameters: of this rank. counted: those of them that no other rank of the group counts.
    """
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    squared = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in _apart([parameter.grad for parameter in counted if parameter.grad is not None]):
        norm: Any = get_total_norm(gradients)
        # float64: where a rank counts nothing, torch's norm is float32, whichever the others' is.
        squared += (norm.full_tensor() if is_shard(norm) else norm).to(device, torch.float64) ** 2
    dist.all_reduce(squared, group=group)
    for parts in _apart(clipped):
        dtype = reduce(torch.promote_types, {parameter.dtype for parameter in parts})
        clip_grads_with_norm_(parts, max_norm, squared.sqrt().to(dtype))


def _apart(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns shards and whole tensors in lists of their own: torch's norms take none of both. No list is empty."""
    kinds = ([t for t in tensors if is_shard(t)], [t for t in tensors if not is_shard(t)])
    return [kind for kind in kinds if kind]
