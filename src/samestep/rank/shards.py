"""What this rank keeps of a tensor: its shard, all of it, or nothing.

torch.distributed.tensor is imported where there is a DTensor, and so is there already: its import takes as long as
torch's own, and most trainings shard nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.job import Job
from samestep.message import Message, message
from samestep.rank.row_order import in_order_of_model
from samestep.world.foreign_code import error_line
from samestep.world.imports import is_users_code

BUCKET_BYTES = 250 << 20  # the most bytes of one broadcast, as in DDP's of a model
BLOCKS_BYTES = 4 << 20  # the most bytes of all ranks' blocks, which each rank holds: 64 threads hold 64 times as much
NOT_ON_SHARDS = {  # class of optimizer -> why it cannot take DTensors
    "Adafactor": message("optimizer_fails_on_shards"),
    "Muon": message("optimizer_needs_whole_matrices"),
    "Rprop": message("optimizer_fails_on_shards"),
}
StateDict = dict[str, Any]  # what a state_dict() returns: tensors and plain values by name


def is_shard(tensor: Any) -> bool:
    """Returns whether a tensor is sharded: a DTensor."""
    return hasattr(tensor, "_local_tensor")


def explain_optimizer_on_shards(error: BaseException, job: Job) -> Message | None:
    """Returns a message about a method of the job's optimizer that raised where it was given shards; None for other
    errors."""
    if job.optimizer.needs_closure:  # within its step the model computes, too
        return None
    for frame, line in walk_tb(error.__traceback__):
        optimizer, code = frame.f_locals.get("self"), frame.f_code
        # Not a method that it has inherited from torch: that only calls the one that is meant.
        if isinstance(optimizer, Optimizer) and vars(type(optimizer)).get(code.co_name) is not None:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(map(is_shard, held)):
                return message(
                    "optimizer_raised_on_shards",
                    optimizer=type(optimizer).__name__,
                    method=code.co_name,
                    error=error_line(error),
                    at=f"{code.co_filename}, line {line}" if is_users_code(code.co_filename) else None,
                )
    return None


def divide_along(parameter: nn.Parameter, axis: str, *, copied: bool = False) -> None:
    """Notes that ranks have different parameters along an axis of the mesh, of which this one has `parameter`.

    copied: whether an earlier rank has it, too: a tied one.
    """
    parameter.divided_along, parameter.copied_along = axis, copied  # type: ignore[attr-defined]


def divided_along(tensor: Any) -> tuple[str, ...]:
    """Returns the axis of the mesh along which ranks have other parameters instead of this one; else nothing."""
    axis = getattr(tensor, "divided_along", "")
    return (axis,) if axis else ()


def is_copied(tensor: Any) -> bool:
    """Returns whether a parameter of a divided model is on an earlier rank, too, as a tied one is."""
    return bool(getattr(tensor, "copied_along", False))


def is_divided(model: nn.Module) -> bool:
    """Returns whether ranks have different parameters, as the stages of a pipeline: others' are on `meta` here."""
    return any(parameter.is_meta for parameter in model.parameters())


def fsdp_params_of(unit: Any) -> list[Any]:
    """Returns torch's `FSDPParam` of each parameter that FSDP2 shards as part of this unit."""
    state = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]  # of a torch whose units have one group
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def block_of(tensor: Any) -> Tensor:
    """Returns the block of a tensor that this rank keeps: the whole tensor, where it is no DTensor."""
    block: Tensor = tensor._local_tensor if is_shard(tensor) else tensor.data
    return block.detach()


def place_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offset of this rank's block of a tensor."""
    if not is_shard(tensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def sharded_like(block: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's `block` as a DTensor, sharded as `parameter` is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(block, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def full_state_dict(model: nn.Module) -> StateDict:
    """Returns a module's state dict, with shards gathered on every rank."""
    state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    return in_order_of_model(model, state)


def gather_absent(model: nn.Module, owners: Mapping[str, int], *, group: dist.ProcessGroup, device: str) -> None:
    """Lets the model's state_dict(), which all ranks of the group must call, have the tensors that other ranks have.

    owners: the name of a tensor -> the place in the group of the rank that has it.
    """

    def gather(module: nn.Module, state: StateDict, prefix: str, metadata: Any) -> None:
        sent: dict[int, list[Tensor]] = {}
        for name, tensor in state.items():
            if isinstance(tensor, Tensor) and name in owners:
                if tensor.is_meta:
                    # Not empty_like(), which torch computes in Python for a tensor on `meta`.
                    full_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                else:  # a shard is gathered by the ranks that have the others
                    held: Any = tensor
                    full_tensor = (held.full_tensor() if is_shard(held) else held).detach().contiguous()
                state[name] = full_tensor
                sent.setdefault(owners[name], []).append(full_tensor)
        block_bytes = max((sum(tensor.nbytes for tensor in tensors) for tensors in sent.values()), default=0)
        if 0 < block_bytes * group.size() <= BLOCKS_BYTES:
            _gather_blocks(sent, block_bytes, group=group, device=device)
            return
        for owner, tensors in sent.items():
            dist._broadcast_coalesced(group, tensors, BUCKET_BYTES, owner)  # type: ignore[attr-defined]

    model.register_state_dict_post_hook(gather)


def _gather_blocks(
    sent: Mapping[int, Sequence[Tensor]], block_bytes: int, *, group: dist.ProcessGroup, device: str
) -> None:
    """Gives the tensors of each owner to all ranks in one collective: as many as there are owners take long where
    ranks are threads, and each takes its turn in every one.

    sent: owner -> its tensors, contiguous, which the other ranks have without values. block_bytes: of the owner that
    has most.
    """
    blocks = [*torch.empty(group.size() * block_bytes, dtype=torch.uint8, device=device).split(block_bytes)]
    block, rank = torch.zeros(block_bytes, dtype=torch.uint8, device=device), dist.get_rank(group)
    for tensor_bytes, piece in _in_block(sent.get(rank, ()), block):
        piece.copy_(tensor_bytes)
    dist.all_gather(blocks, block, group=group)
    for owner, tensors in sent.items():
        for tensor_bytes, piece in _in_block(tensors, blocks[owner]):
            tensor_bytes.copy_(piece)


def _in_block(tensors: Sequence[Tensor], block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns the bytes of each contiguous tensor, and those of a block that are for it."""
    sizes = [tensor.nbytes for tensor in tensors]
    return zip((tensor.view(-1).view(torch.uint8) for tensor in tensors), block[: sum(sizes)].split(sizes))
