"""How the script's ranks are arranged on a mesh and divide the model, as samestep tried it in one process."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.job import Job
from samestep.rank.tensor_parallel import split_by_plan

MESH: dict[str, int] = {}  # axis -> its ranks, the outermost first
PLAN: dict[str, str] = {}  # layer -> how the ranks of a replica split it
CHANGED: tuple[str, ...] = ()  # layers whose output the model changes in place


def device_mesh(world: Any, axes: tuple[str, ...]) -> DeviceMesh:
    """Returns torch's mesh of all ranks. axes: its dimensions, the outermost first."""
    if prod(MESH.values()) != world.size:
        raise SystemExit(f"this script is for {prod(MESH.values())} ranks, not for {world.size}")
    sizes = tuple(MESH.get(axis, 1) for axis in axes)
    return init_device_mesh(world.device.partition(":")[0], sizes, mesh_dim_names=axes)


def split_layers(model: nn.Module, job: Job, ranks: DeviceMesh) -> None:
    """Splits the layers of the plan over the ranks of a replica: their parameters become DTensors."""
    split_by_plan(model, PLAN, ranks, changed=CHANGED, dims={})
