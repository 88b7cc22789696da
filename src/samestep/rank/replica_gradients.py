"""Averages the gradients of replicas whose ranks divide the model, by hand: DDP takes neither DTensors nor stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from samestep.rank.shards import block_of


def average_gradients(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Averages the gradients over the ranks that have the same part of the model in each replica."""
    if replicas.size() == 1:
        return
    fill_missing_gradients(model, replicas)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = block_of(parameter.grad)
            dist.all_reduce(gradient, group=replicas)
            gradient /= replicas.size()


def fill_missing_gradients(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Gives each parameter a gradient of zeros where another replica has one, as where data decide which modules are
    called; else the replicas would call different all-reduces. What has no gradient on any replica keeps none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    device = next((p.device for p in trained if not p.is_meta), torch.device("cpu"))
    given = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=device)
    dist.all_reduce(given, dist.ReduceOp.MAX, group=replicas)
    for parameter, is_given in zip(trained, given.tolist()):
        if is_given and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
