"""The stages of a pipeline, sharded: each stage is one unit of FSDP2, which torch's schedule gathers and reduces.

A stage is gathered once a step, before its first micro-batch, and its gradients are reduced after its last one: so do
torch's schedules with a stage that is an FSDPModule. Its ranks hold whole all the same: scalars, parameters that also
another stage of theirs has (tied ones, where a rank has several stages), and those of a module that contains other
stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from samestep.parallel.pipeline_stages import DividedModel, StageModule
from samestep.parallel.replica_gradients import fill_missing_gradients
from samestep.rank.shards import fsdp_params_of


def shard_stages(divided: DividedModel, stages: Iterable[StageModule], mesh: DeviceMesh) -> None:
    """Shards the parameters of this rank's stages over the ranks of a mesh."""
    modules = list(stages)
    used = {module.stage: divided.parameters_of(module.stage) for module in modules}
    places = _places(divided.model)
    for module in modules:
        of_others = {id(p) for stage, parameters in used.items() if stage != module.stage for p in parameters}
        shardable = {id(p) for p in used[module.stage] if p.dim() and id(p) not in of_others}
        inside = list(_modules_of(divided.model, shardable))
        while read_outside := shardable & _called_outside(places, inside):
            shardable -= read_outside
            inside = list(_modules_of(divided.model, shardable))
        reached = {id(parameter) for inner in inside for parameter in inner.parameters()}
        if inside:
            # Not a child of the model: torch looks into all modules of a stage for parameters.
            stage_parameters = [p for p in used[module.stage] if id(p) not in reached]
            module.parameters_of_stage = nn.ParameterList(stage_parameters)
            module.sharded = nn.ModuleList(inside)
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params={*stage_parameters})
            module.before_reduction = partial(_fill_missing_gradients, module, mesh)
            for parameter in reached:
                _tie(places[parameter], inside)
    divided.note_stages()


def _fill_missing_gradients(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each parameter of a gathered stage a gradient where it has one on any rank of the mesh: FSDP reduces those
    that it finds, and rows may decide which modules are called."""
    gathered = [parameter.unsharded_param for parameter in fsdp_params_of(stage)]
    for group in mesh.get_all_groups():
        fill_missing_gradients([parameter for parameter in gathered if parameter.requires_grad], group)


def _modules_of(module: nn.Module, parameters: Collection[int]) -> Iterator[nn.Module]:
    """Yields the outermost modules that have some of the parameters with these ids, and no others."""
    held = [id(parameter) for parameter in module.parameters()]
    if held and all(parameter in parameters for parameter in held):
        yield module
        return
    for child in module.children():
        yield from _modules_of(child, parameters)


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Returns the id of each parameter -> the modules that have it, and its name there."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return places


def _called_outside(places: Mapping[int, Sequence[tuple[nn.Module, str]]], inside: Sequence[nn.Module]) -> set[int]:
    """Returns the ids of parameters that a module outside of those has, too, which this rank may call: one that lacks
    no parameter."""
    known = {module for outer in inside for module in outer.modules()}
    return {
        parameter
        for parameter, holders in places.items()
        for module, _ in holders
        if module not in known and not any(inner.is_meta for inner in module.parameters(recurse=False))
    }


def _tie(places: Sequence[tuple[nn.Module, str]], inside: Sequence[nn.Module]) -> None:
    """Gives the shard of a tied parameter to the modules outside of those: of stages that other ranks have."""
    known = {module for outer in inside for module in outer.modules()}
    shard = next(module.get_parameter(name) for module, name in places if module in known)
    for module, name in places:
        if module not in known:
            module._parameters[name] = shard
