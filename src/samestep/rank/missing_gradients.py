"""Gradients that only some replicas have, as where data decide which modules are called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def fill_missing_gradients(parameters: Iterable[Tensor], replicas: dist.ProcessGroup) -> None:
    """Gives each parameter a gradient of zeros where another replica has one; else the replicas would call different
    all-reduces. A parameter without a gradient on all replicas keeps none."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    device = next((p.device for p in trained if not p.is_meta), torch.device("cpu"))
    given = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=device)
    dist.all_reduce(given, dist.ReduceOp.MAX, group=replicas)
    for parameter, is_given in zip(trained, given.tolist()):
        if is_given and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
