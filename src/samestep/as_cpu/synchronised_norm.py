"""Computes SyncBatchNorm over the ranks on CPUs: torch has kernels of it for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.as_cpu import replaced
from samestep.rank.hooks import Hooks

# torch's own, which the recorder does not take for the script's.
all_reduce = dist.all_reduce


def attach(hooks: Hooks) -> None:
    """Replaces the forward of SyncBatchNorm."""
    hooks.attach(nn.SyncBatchNorm, "forward", _forward)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group. What each rank hands in takes part in the outputs of all, so that
    its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous().clone()
        all_reduce(gradient, group=ctx.group)
        return gradient, None


def _forward(_: Any, norm: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    group = norm.process_group or dist.group.WORLD
    is_of_ranks = norm.training and dist.is_initialized() and dist.get_world_size(group) > 1
    if not is_of_ranks:
        return _BatchNorm.forward(norm, input)  # SyncBatchNorm's own refuses a CPU
    replaced.note("synchronised_norm")
    rows = [dimension for dimension in range(input.dim()) if dimension != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    values = input.float()
    count = torch.full((1,), float(input.numel() // input.shape[1]))
    sum_over_ranks: Any = _SumOverRanks.apply
    totals = sum_over_ranks(torch.cat([values.sum(rows), count]), group)
    size = totals[-1].detach()
    mean = totals[:-1] / size
    centred = values - mean.view(shape)
    variance = sum_over_ranks(centred.square().sum(rows), group) / size
    normal: Tensor = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
    if norm.track_running_stats:
        _keep_statistics(norm, mean.detach(), variance.detach(), float(size))
    return normal.to(input.dtype)


def _keep_statistics(norm: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, size: float) -> None:
    """Moves the running statistics, whose variance is that of a sample."""
    assert norm.num_batches_tracked is not None and norm.running_mean is not None and norm.running_var is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
        norm.running_var.lerp_((variance * size / (size - 1)).to(norm.running_var.dtype), factor)
