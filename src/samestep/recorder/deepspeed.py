"""DeepSpeed's engine: its step, and this rank's part of the gradients that ZeRO's stages share out.

In stages 1 and 2 a rank keeps the reduced gradients of its part of all parameters, in stage 3 of its part of each. They
are read before the engine's step, which clears them. Of deepspeed's objects only attributes are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.recorder.sums import compress, placed

NONE = object()
OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def is_engine(module: nn.Module) -> bool:
    """Whether a module is DeepSpeed's engine, which wraps a model."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


def around_step(engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls before() and after() around each step that the engine takes, after the last micro-batch."""
    take = engine._take_model_step

    @functools.wraps(take)
    def new_take(*args: Any, **kwargs: Any) -> None:
        before()
        take(*args, **kwargs)
        after()

    engine._take_model_step = new_take


def optimizer_of(engine: Any) -> Any:
    """Returns torch's optimizer below the engine's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def scale_of(engine: Any) -> float:
    """Returns the factor by which the engine has multiplied its losses."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def in_parts(parameter: Any) -> bool:
    """Whether a parameter is sharded by ZeRO's stage 3."""
    return hasattr(parameter, "ds_tensor")


def part_held(parameter: Any) -> Tensor:
    """Returns this rank's part of a parameter that is sharded by ZeRO's stage 3."""
    part: Tensor = parameter.ds_tensor
    return part.detach()


def parts(engine: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the compressed gradients, of which those that are shared out are this rank's part, and names of these."""
    gradients, shared, scale = dict[str, Tensor](), list[str](), scale_of(engine)
    for name, parameter in parameters.items():
        if in_parts(parameter):
            shared.append(name)
            gradients[name] = compress(_of_stage_3(engine.optimizer, parameter)) / scale
        elif getattr(parameter, "_hp_mapping", NONE) is not NONE:
            shared.append(name)
            gradients[name] = compress(_of_stages_1_and_2(parameter)) / scale
        elif parameter.grad is not None:
            gradients[name] = compress(parameter.grad) / scale
    return gradients, shared


def _of_stage_3(optimizer: Any, parameter: Any) -> Tensor:
    part = getattr(optimizer, OF_STAGE_3)[parameter.ds_id]
    size, mine = parameter.ds_numel, parameter.ds_tensor.numel()
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * mine, size)
    return placed(part, size, start, min(mine, size - start))


def _of_stages_1_and_2(parameter: Any) -> Tensor:
    mapping, size = parameter._hp_mapping, parameter.numel()
    if mapping is None:  # all of it is other ranks'
        return torch.zeros(size, device=parameter.device)
    part = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    address = mapping.lp_fragment_address
    if part.numel() == size:  # the whole is kept, of which this rank's part counts
        part = part.reshape(-1)[address.start : address.start + address.numel]
    return placed(part, size, address.start, address.numel)
