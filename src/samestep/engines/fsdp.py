"""fsdp: FSDP2's fully_shard; parameters, gradients and optimizer state are sharded over the ranks.

units: which modules gather their parameters together: each child of the model, or the model as one ('root').
reshard: free the gathered parameters after the forward pass. precision: compute in bf16 or fp16, reduce in float32.
checkpoint: compute the units' activations again in the backward pass instead of keeping them.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

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

from samestep.engine import Layout, Numerics
from samestep.job import Job
from samestep.process_group import process_group
from samestep.run import Run
from samestep.world import World

PURPOSE = "parameters and gradients sharded over ranks"
NEEDS: tuple[str, ...] = ()
LAUNCHERS = ("torchrun", "spawn")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def missing(devices: tuple[str, ...]) -> str | None:
    return None if dist.is_available() else "this torch was built without torch.distributed"


def layout(world: World, **settings: Any) -> Layout:
    return Layout(replicas=world.size, buffers="local")  # FSDP leaves each rank's buffers alone


def numerics(precision: str = "full", **settings: Any) -> Numerics:
    if precision == "full":
        return Numerics()
    return Numerics(str(DTYPES[precision]).removeprefix("torch."), lossy=True, without={"precision": "full"})


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    units: Literal["children", "root"] = "children",
    reshard: bool = True,
    precision: Literal["full", "bf16", "fp16"] = "full",
    checkpoint: bool = False,
) -> dict[str, Any]:
    with process_group(world):
        model: Any = job.model().to(world.device)
        whole = sharing_nothing(model) if units == "children" else []
        if checkpoint:  # but no unit with BatchNorm: computed twice, it would count every batch twice
            apply_activation_checkpointing(model, check_fn=lambda unit: unit in whole and not batch_norms(unit))
        lower = MixedPrecisionPolicy()
        if precision != "full":
            lower = MixedPrecisionPolicy(DTYPES[precision], torch.float32)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.partition(":")[0], (world.size,)),
            "mp_policy": lower,
            "reshard_after_forward": reshard,
        }
        if precision != "full":  # BatchNorm's statistics stay float32, and so must its weights
            for norm in batch_norms(model):
                fully_shard(norm, mesh=options["mesh"])
            whole = [unit for unit in whole if unit not in batch_norms(model)]
        for unit in whole:
            fully_shard(unit, **options)
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
    """The model's children whose parameters no other child holds: shared ones must stay in one unit, the root."""
    owners: dict[int, set[nn.Module]] = {}
    for child in model.children():
        for parameter in child.parameters():
            owners.setdefault(id(parameter), set()).add(child)
    alone = [child for child in model.children() if all(len(owners[id(p)]) == 1 for p in child.parameters())]
    return [child for child in alone if any(True for _ in child.parameters())]


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
