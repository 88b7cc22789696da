"""fsdp: FSDP2's fully_shard; parameters, gradients and optimizer state are sharded over the ranks.

units: what is sharded as one unit: each child of the model, or the whole model ('root').
reshard: free the gathered parameters after the forward pass. precision: compute in bf16, reduce in float32.
checkpoint: activation checkpointing of each unit.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Layout, Numerics, State
from samestep.job import Job
from samestep.rank.group import process_group
from samestep.training import Run
from samestep.world import World

PURPOSE = "parameters and gradients sharded over ranks"
NEEDS: tuple[str, ...] = ()
PROCESSES = "group"


def missing(devices: tuple[str, ...]) -> str | None:
    return None if dist.is_available() else "this torch was built without torch.distributed"


def layout(world: World, **settings: Any) -> Layout:
    return Layout(replicas=world.size, buffers="local", no_scalars=True)  # FSDP does not synchronise buffers


def numerics(precision: str = "full", **settings: Any) -> Numerics:
    if precision == "full":
        return Numerics()
    return Numerics("bfloat16", lossy=True, without={"precision": "full"})


def explain(error: BaseException, job: Job) -> str | None:
    """Returns a sentence about a call into a sharded unit that bypasses its forward; None for other errors."""
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    return (
        "the model calls a part of a sharded unit by itself, so that its parameters are not gathered; shard "
        "the model as one, as in --set-engine units=root"
    )


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    units: Literal["children", "root"] = "children",
    reshard: bool = True,
    precision: Literal["full", "bf16"] = "full",
    checkpoint: bool = False,
) -> State:
    with process_group(world):
        model: Any = job.model().to(world.device)
        parts = sharing_nothing(model)
        if checkpoint:  # but no unit with BatchNorm: computed twice, it would count every batch twice
            apply_activation_checkpointing(model, check_fn=lambda part: part in parts and not batch_norms(part))
        mesh, lower = init_device_mesh(world.device.partition(":")[0], (world.size,)), MixedPrecisionPolicy()
        if precision != "full":
            lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for norm in batch_norms(model):  # their statistics stay float32, and so must their weights
                fully_shard(norm, mesh=mesh)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": lower, "reshard_after_forward": reshard}
        for part in parts if units == "children" else []:
            if precision == "full" or part not in batch_norms(model):
                fully_shard(part, **options)
        fully_shard(model, **options)
        optimizer = job.optimizer.build(model)  # after sharding: of the shards
        scheduler = job.lr_scheduler(optimizer)
        run.begin(model, optimizer)
        for batch in run.batches():
            model.set_requires_gradient_sync(batch.completes_step)
            loss = run.loss(model, batch)
            loss.backward()
            if batch.completes_step:
                if job.clip_norm is not None:
                    clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def sharing_nothing(model: nn.Module) -> list[nn.Module]:
    """The model's parts whose parameters no other part holds: shared ones must stay in one unit, the root. A list of
    layers is no part, because nobody calls it; its layers are."""
    lists = (nn.ModuleList, nn.ModuleDict)
    parts = [p for c in model.children() for p in (c.children() if isinstance(c, lists) else [c])]
    held = Counter(id(parameter) for part in parts for parameter in part.parameters())
    own = [
        part
        for part in parts
        if any(True for _ in part.parameters()) and not isinstance(part, nn.ParameterList | nn.ParameterDict)
    ]
    return [part for part in own if all(held[id(parameter)] == 1 for parameter in part.parameters())]


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
