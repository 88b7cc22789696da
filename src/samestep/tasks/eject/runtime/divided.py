"""How the script's ranks divide the model, as samestep tried it in one process."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samestep.errors import UserError
from samestep.job import Job
from samestep.parallel.tensor_parallel import split_by_plan

PLAN: dict[str, str] = {}  # layer -> how the ranks of a replica split it
CHANGED: tuple[str, ...] = ()  # layers whose output the model changes in place


def split_layers(model: nn.Module, job: Job, ranks: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Splits the layers of the plan over the ranks of a replica: their parameters become DTensors."""
    if sequence_parallel:
        raise UserError("a script has no sequence_parallel; leave it out")
    split_by_plan(model, PLAN, ranks, changed=CHANGED, dims={})
