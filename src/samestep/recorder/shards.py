"""Parameters that are sharded over the ranks: what a rank holds of each, and of FSDP2's DTensors its own gradients.

A rank holds a block of each parameter. Its compressed sums are those of the whole with zeros elsewhere; added up over
the ranks, they are the whole's. Its own gradients are seen on the unsharded parameters, which exist during a forward
pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from samestep.rank.shards import block_of, digests, is_shard, place_of
from samestep.recorder import deepspeed
from samestep.recorder.sums import compress


def is_sharded(parameter: Any) -> bool:
    """Whether a rank holds a part of a parameter: by FSDP2, or by stage 3 of DeepSpeed's ZeRO."""
    return is_shard(parameter) or deepspeed.in_parts(parameter)


def held_by_rank(tensor: Any) -> Tensor:
    """Returns what this rank holds of a tensor: its part of a sharded one, else the whole."""
    return deepspeed.part_held(tensor) if deepspeed.in_parts(tensor) else block_of(tensor)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the digest of what this rank holds of each."""
    held = {name: held_by_rank(tensor) for name, tensor in tensors.items()}
    return dict(zip(held, digests(held))) if held else {}


def is_whole_in_world(tensor: Any, world_size: int) -> bool:
    """Whether a tensor is sharded, and each element of it on exactly one rank of the world."""
    sharded = is_shard(tensor) and all(placement.is_shard() for placement in tensor.placements)
    return sharded and int(tensor.device_mesh.size()) == world_size


def dimension_of(tensor: Any, world_size: int) -> int | None:
    """Returns the dimension in which a tensor is cut into one block for each rank of the world, in their order; None
    where it is sharded otherwise."""
    if not is_whole_in_world(tensor, world_size) or len(tensor.placements) != 1:
        return None
    return int(tensor.placements[0].dim)


def splits_model(module: nn.Module) -> bool:
    """Whether parameters below are sharded by something else than FSDP2, or beside it: a tensor-parallel model, whose
    ranks compute parts of the same rows."""
    by_fsdp = {id(p) for each in _fsdp(module) for p in each.parameters()}
    return any(
        is_shard(p) and (id(p) not in by_fsdp or sum(each.is_shard() for each in p.placements) > 1)  # type: ignore[attr-defined]
        for p in module.parameters()
    )


def part_of(tensor: Any) -> Tensor:
    """Returns the compressed sums of a tensor; of a sharded one, this rank's part of them."""
    if not is_shard(tensor):
        return compress(tensor)
    block = block_of(tensor)
    whole = block.new_zeros(tensor.shape)
    shape, offset = place_of(tensor)
    whole[tuple(slice(start, start + length) for start, length in zip(offset, shape))] = block
    return compress(whole)


def unsharded(module: nn.Module) -> set[int]:
    """Returns the ids of the plain parameters of FSDP2's modules below. They stand for the sharded ones in a forward
    pass, and their storage is freed afterwards."""
    return {id(p) for each in _fsdp(module) for p in each.parameters() if not is_shard(p)}


def _fsdp(module: nn.Module) -> list[nn.Module]:
    """Returns FSDP2's modules below."""
    return [each for each in module.modules() if "FSDPModule" in (kind.__name__ for kind in type(each).__mro__)]


def watch(
    module: nn.Module, names: Mapping[int, str], hooked: dict[int, Tensor], seen: Callable[[str, Tensor], None]
) -> None:
    """Calls seen(name, gradient) with each gradient that this rank computes of the sharded parameters below `module`.

    names: id of a sharded parameter -> its name. hooked: the unsharded parameters, by their ids, are added to it.
    """

    def unsharded(own: Mapping[str, str], below: nn.Module, _: Any) -> None:
        for attribute, name in own.items():
            parameter = getattr(below, attribute)
            if not is_shard(parameter) and parameter.requires_grad and id(parameter) not in hooked:
                hooked[id(parameter)] = parameter
                parameter.register_hook(functools.partial(seen, name))

    for below in module.modules():
        own = {attribute: names[id(p)] for attribute, p in below._parameters.items() if id(p) in names}
        if own:
            below.register_forward_pre_hook(functools.partial(unsharded, own))
