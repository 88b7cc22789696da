"""The stages of a pipeline, sharded: each stage is one unit of FSDP2, which torch's schedule gathers and reduces.

A stage is gathered once a step, before its first micro-batch, and its gradients are reduced after its last one: so do
torch's schedules with a stage that is an FSDPModule. Its ranks hold whole all the same: scalars, parameters that also
another stage of theirs has (tied ones, where a rank has several stages), and those of a module that contains other
stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from samestep.rank.pipeline_stages import DividedModel, StageModule


def shard_stages(divided: DividedModel, stages: Iterable[StageModule], mesh: DeviceMesh) -> None:
    """Shards the parameters of this rank's stages over the ranks of a mesh."""
    modules = list(stages)
    used = {module.stage: {id(parameter) for parameter in divided.parameters_of(module.stage)} for module in modules}
    for module in modules:
        of_others = set().union(*(used[other] for other in used if other != module.stage))
        shardable = {id(p) for p in divided.parameters_of(module.stage) if p.dim() and id(p) not in of_others}
        inside = list(_modules_of(divided.model, shardable))
        reached = {id(parameter) for inner in inside for parameter in inner.parameters()}
        whole = [p for p in divided.parameters_of(module.stage) if id(p) not in reached]
        if inside:
            # Not as the model's own child: torch looks into all modules of a stage for parameters.
            module.parameters_of_stage = nn.ParameterList(whole)
            module.sharded = nn.ModuleList(inside)
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params={*whole})
    divided.note_stages()


def _modules_of(module: nn.Module, parameters: Collection[int]) -> Iterator[nn.Module]:
    """Yields the outermost modules that have some of the parameters with these ids, and no others."""
    held = [id(parameter) for parameter in module.parameters()]
    if held and all(parameter in parameters for parameter in held):
        yield module
        return
    for child in module.children():
        yield from _modules_of(child, parameters)
