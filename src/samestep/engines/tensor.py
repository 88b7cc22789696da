"""tensor: tensor parallelism; the weights of Linear layers are split over the ranks of a replica.

    samestep verify my_job.py --engine tensor --nproc 2
    samestep run my_job.py --engine tensor --mesh data=2,tensor=2

A pair of layers is split by columns, then by rows, so that one all-reduce puts their outputs together. Which pairs:
Job(parallel=…), or what is found in the model; rank/tensor_plan.py tries either in one process before any rank starts.
Replicas (`data`) train on their own rows, and average their gradients.
Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.job import Job
from samestep.message import Message
from samestep.rank.process_group import process_group
from samestep.rank.shards import NOT_ON_SHARDS, block_of, full_state_dict
from samestep.rank.tensor_plan import COLWISE, GATHERED, division_of
from samestep.training import Run
from samestep.world import World
from samestep.world.mesh import Mesh


def layout(world: World) -> Layout:
    # Nothing synchronises the replicas' buffers; the ranks of a replica have the same rows, and so the same buffers.
    return Layout(replicas=world.replicas, buffers="local", lone_batchnorm=True, no_optimizers=NOT_ON_SHARDS)


def divides(job: Job, world: World) -> Message:
    """Returns how the ranks of a replica divide the job's model. Raises UserError where they cannot."""
    ranks = (world.mesh or Mesh()).tensor
    return division_of(job, ranks, world.device).said(job.model(), ranks)


def train(job: Job, world: World, run: Run) -> State:
    mesh = world.mesh or Mesh(tensor=world.size)
    with process_group(world):
        ranks = init_device_mesh(
            world.device.partition(":")[0], (mesh.data, mesh.tensor), mesh_dim_names=("data", "tensor")
        )
        plan = division_of(job, mesh.tensor, world.device).plan
        model: nn.Module = job.model().to(world.device)
        styles = {name: style_of(plan[name], model.get_submodule(name)) for name in plan}
        parallelize_module(model, ranks["tensor"], styles)
        optimizer = job.optimizer.build(model)  # after splitting: of the parts
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        for batch in run.batches():
            loss = run.loss(model, batch)
            loss.backward()
            if batch.completes_step:
                average_gradients(model, ranks["data"])
                if job.clip_norm is not None:
                    clip(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return full_state_dict(model)


def style_of(style: str, layer: nn.Module) -> ParallelStyle:
    """Returns torch's style: a layer split by columns keeps its part of the output, one by rows adds the parts up."""
    if style == COLWISE:
        return ColwiseParallel()
    if style == GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    if isinstance(layer, nn.Embedding):  # whose input, the tokens, every rank has
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel()


def average_gradients(model: nn.Module, replicas: DeviceMesh) -> None:
    """Averages the gradients of the replicas: of split ones, those of the ranks that have the same part."""
    if replicas.size() == 1:
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = block_of(parameter.grad)
            dist.all_reduce(gradient, group=replicas.get_group())
            gradient /= replicas.size()


def clip(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Clips by the norm of the whole gradient: the parts of split ones are added up over the ranks, whole ones count
    once. torch's clip_grad_norm_ does not take both together."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    split = [parameter for parameter in with_gradient if isinstance(parameter.grad, DTensor)]
    whole = [parameter for parameter in with_gradient if not isinstance(parameter.grad, DTensor)]
    norms = []
    for group in filter(None, (split, whole)):
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in filter(None, (split, whole)):
        clip_grads_with_norm_(group, max_norm, total)


ENGINE = Engine(
    purpose="weights of layers split over ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(divides=divides),
    axes=("tensor", "data"),
)
