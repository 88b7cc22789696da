"""Tensor parallel layers on a mesh of ranks: torch's styles for a plan, and the norm of gradients on several meshes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from samestep.job import Job
from samestep.message import Message, message
from samestep.parallel.loss_parallel import output_layer
from samestep.parallel.sequence_parallel import SequenceShards, dim_of_layers, sequence_parallel_plan
from samestep.parallel.tensor_plan import GATHERED, OUTPUTS, ROWWISE, division_of
from samestep.rank.row_order import order_rows
from samestep.world import World


def how_divided(
    job: Job, world: World, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> Message | None:
    """Returns how the tensor parallel ranks of a replica divide the job's model; None where there are none. Raises
    UserError where they cannot."""
    ranks = world.mesh.tensor if world.mesh else 1
    if ranks == 1:
        return None
    division = division_of(job, ranks, world.device)
    sequence = sequence_parallel_plan(job, division.plan, ranks, world.device) if sequence_parallel else None
    output = output_layer(job, division.plan, ranks, world.device).name if loss_parallel else ""
    return division.said(job.model(), ranks, chunks=sequence.names(job.model()) if sequence else None, output=output)


def split_layers(
    model: nn.Module, job: Job, ranks: DeviceMesh, *, sequence_parallel: bool = False
) -> SequenceShards | None:
    """Splits the layers of a plan over the ranks of a replica: their parameters become DTensors. Returns this rank's
    chunk of the positions where `sequence_parallel`. ranks: of one axis."""
    device = str(next(model.parameters()).device)
    division = division_of(job, ranks.size(), device)
    sequence = sequence_parallel_plan(job, division.plan, ranks.size(), device) if sequence_parallel else None
    dims = dim_of_layers(division.plan, sequence.blocks) if sequence else {}
    split_by_plan(model, division.plan, ranks, changed=division.changed, dims=dims)
    return SequenceShards(model, sequence, ranks) if sequence else None


def split_by_plan(
    model: nn.Module, plan: Mapping[str, str], ranks: DeviceMesh, *, changed: Collection[str], dims: Mapping[str, int]
) -> None:
    """Splits layers. plan: layer -> style. changed: layers whose output the model changes in place. dims: layer -> the
    dimension of the positions, of which the ranks have chunks before and after it."""
    # torch warns at each gathering of a weight that FSDP splits, too, that it takes two of them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, style in plan.items():
        layer = model.get_submodule(name)
        if style in OUTPUTS and OUTPUTS[style] > 1:
            order_rows(layer, OUTPUTS[style], ranks.size())  # of its outputs each rank has a part
        split_layer(layer, ranks, style_of(style, layer, dims.get(name)))
        if name in changed:  # torch's output is a view, which autograd lets nothing change in place
            layer.register_forward_hook(lambda layer, inputs, output: output.clone())


def split_layer(layer: nn.Module, ranks: DeviceMesh, style: ParallelStyle) -> None:
    """Splits a layer. Its parameters keep the attributes that the job has set, by which it may choose their groups."""
    attributes = {name: vars(parameter) for name, parameter in layer.named_parameters()}
    parallelize_module(layer, ranks, style)
    for name, parameter in layer.named_parameters():
        vars(parameter).update(attributes[name])


def split_output(model: nn.Module, job: Job, ranks: DeviceMesh) -> None:
    """Splits the output layer by the vocabulary, and an Embedding that shares its weight: logits are DTensors."""
    device = str(next(model.parameters()).device)
    output = output_layer(job, division_of(job, ranks.size(), device).plan, ranks.size(), device)
    layer = model.get_submodule(output.name)
    split_layer(layer, ranks, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    if output.tied:
        embedding = model.get_submodule(output.tied)
        parallelize_module(embedding, ranks, style_of(ROWWISE, embedding))
        embedding.weight = layer.weight


def explain_split(error: BaseException, job: Job) -> Message | None:
    """Returns a message about what is done with a split layer in a step, and not with the rows that it was tried on;
    None for other errors."""
    if "DTensor" in str(error):
        return message("split_weight_meets_whole_tensor")
    return message("output_of_split_layer_changes_in_place") if "_ToTorchTensor" in str(error) else None


def step_one_by_one(optimizer: Optimizer) -> None:
    """Lets an optimizer update each parameter by itself, as it does on a CPU. torch's kernels for lists of tensors,
    which it takes on GPUs, take no list of parts and of whole parameters."""
    for group in optimizer.param_groups:
        group.update({switch: False for switch in ("foreach", "fused") if switch in group})


def style_of(style: str, layer: nn.Module, positions: int | None = None) -> ParallelStyle:
    """Returns torch's style: a layer split by columns keeps its part of the output, one by rows adds the parts up.

    positions: the dimension along which the ranks have chunks before and after such layers; None: all have all.
    """
    outside = Replicate() if positions is None else Shard(positions)
    if style in OUTPUTS:
        return ColwiseParallel(input_layouts=outside)
    if style == GATHERED:
        return ColwiseParallel(input_layouts=outside, output_layouts=outside)
    if isinstance(layer, nn.Embedding):  # whose input, the tokens, every rank has
        return RowwiseParallel(input_layouts=outside, output_layouts=outside)
    return RowwiseParallel(output_layouts=outside)


def clip_whole_norm(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Clips by the norm of the whole gradient: the parts of split ones are added up over their ranks, whole ones count
    once. torch's clip_grad_norm_ takes gradients of one mesh alone."""
    of_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            of_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in of_mesh.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms))
        for group in of_mesh.values():
            clip_grads_with_norm_(group, max_norm, total)
