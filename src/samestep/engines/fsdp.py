"""fsdp: FSDP2's fully_shard; parameters, gradients and optimizer state are sharded over the ranks.

    samestep verify my_job.py --engine fsdp --nproc 2
    samestep verify my_job.py --engine fsdp --mesh data=2,shard=2     # HSDP: two replicas of the shards
    samestep verify my_job.py --engine fsdp --mesh shard=2,tensor=2   # shards of tensor parallel layers

wrap: what is sharded as one unit: the blocks that the model repeats ('auto'), each of its children, each module of the
class that is named, or the whole model ('root').
reshard: free the gathered parameters after the forward pass. precision: compute in bf16, reduce in float32.
checkpoint: activation checkpointing of each unit. offload: shards, their gradients and the optimizer's state are in the
CPU's memory, where the optimizer steps. sequence_parallel: as engine tensor's, with an axis `tensor`.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State, without_distributed
from samestep.errors import Refused
from samestep.job import Job
from samestep.message import Message, message
from samestep.parallel.tensor_parallel import clip_whole_norm, how_divided, split_layers, step_one_by_one
from samestep.rank.fsdp_units import FSDPReads, units_of
from samestep.rank.process_group import device_mesh, process_group
from samestep.rank.row_order import in_order_of_model
from samestep.rank.shards import NOT_ON_SHARDS
from samestep.rank.step import explain_dtypes
from samestep.training import Run
from samestep.world import World

# What helps against a read of a parameter that FSDP has freed.
WHOLE = message("keep_fsdp_parameters_whole")
INSIDE = message("compute_inside_of_forward")


def layout(world: World, offload: bool = False, **settings: Any) -> Layout:
    # FSDP does not synchronise buffers. SyncBatchNorm would count the rows of tensor parallel ranks several times.
    alone = world.replicas < world.size
    options: dict[str, Any] = {"buffers": "local", "lone_batchnorm": alone, "no_scalars": True}
    options["reduces_on_cpu"] = offload  # the norm of the gradients
    return Layout(replicas=world.replicas, no_optimizers=NOT_ON_SHARDS, **options)


def numerics(precision: str = "full", **settings: Any) -> Numerics:
    if precision == "full":
        return Numerics()
    return Numerics("bfloat16", lossy=True, rounds="passes", without={"precision": "full"})


def divides(
    job: Job, world: World, sequence_parallel: bool = False, checkpoint: bool = False, **settings: Any
) -> Message | None:
    if sequence_parallel and checkpoint:
        raise Refused(message("sequence_parallel_without_checkpoint"))
    return how_divided(job, world, sequence_parallel=sequence_parallel)


def check(model: nn.Module, *, wrap: str = "auto", **settings: Any) -> None:
    units_of(model, wrap)


def units(model: nn.Module, *, wrap: str = "auto", precision: str = "full", **settings: Any) -> list[nn.Module]:
    return [*units_of(model, wrap), *(batch_norms(model) if precision != "full" else [])]


def explain(error: BaseException, job: Job) -> Message | None:
    """Returns a message about FSDP's hooks in what torch.compile must take whole, or about parameters of several
    dtypes; None for other errors."""
    dtypes = explain_dtypes(error, job)
    return dtypes or (message("fsdp_hooks_in_a_full_graph") if "_fully_shard" in str(error) else None)


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    wrap: str = "auto",
    reshard: bool = True,
    precision: Literal["full", "bf16"] = "full",
    checkpoint: bool = False,
    offload: bool = False,
    sequence_parallel: bool = False,
) -> State:
    with process_group(world), ExitStack() as entered:
        model: Any = job.model().to(world.device)
        blocks = units_of(model, wrap)
        sequence = None
        if world.mesh:
            ranks = device_mesh(world, ("data", "shard", "tensor"))
            mesh = ranks["data", "shard"] if ranks["data"].size() > 1 else ranks["shard"]
            if ranks["tensor"].size() > 1:  # before sharding: of each part its own shards
                sequence = split_layers(model, job, ranks["tensor"], sequence_parallel=sequence_parallel)
        else:
            mesh = init_device_mesh(world.device.partition(":")[0], (world.size,))
        if checkpoint:  # but no unit with BatchNorm: computed twice, it would count every batch twice
            again = blocks or units_of(model, "auto")
            apply_activation_checkpointing(model, check_fn=lambda unit: unit in again and not batch_norms(unit))
        reads = FSDPReads(model, [*blocks, model], WHOLE if reshard or wrap != "root" else INSIDE)
        place = CPUOffloadPolicy(pin_memory=world.device != "cpu") if offload else OffloadPolicy()
        lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision != "full" else MixedPrecisionPolicy()
        if precision != "full":
            for norm in batch_norms(model):  # their statistics stay float32, and so must their weights
                fully_shard(norm, mesh=mesh, offload_policy=place)
        shard = partial(fully_shard, mesh=mesh, mp_policy=lower, offload_policy=place, reshard_after_forward=reshard)
        for unit in [unit for unit in blocks if precision == "full" or unit not in batch_norms(model)]:
            shard(unit)
        shard(model)
        optimizer = job.optimizer.build(model)  # after sharding: of the shards
        if world.mesh and world.mesh.tensor > 1:
            step_one_by_one(optimizer)
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        if sequence:
            entered.enter_context(sequence.on_chunks())
        for batch in run.batches():
            model.set_requires_gradient_sync(batch.completes_step)
            with reads.first(batch.micro_batch):
                loss = run.loss(model, batch)
                loss.backward()
            if batch.completes_step:
                if sequence:
                    sequence.sum_gradients()
                if job.clip_norm is not None:
                    (clip_whole_norm if world.mesh else clip_grad_norm_)(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return in_order_of_model(model, get_model_state_dict(model, options=options))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


ENGINE = Engine(
    purpose="parameters and gradients sharded over ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    numerics=numerics,
    checks=Checks(settings=check, units=units, explain=explain, cannot_spot_check="", divides=divides),
    axes=("shard", "data", "tensor"),
)
