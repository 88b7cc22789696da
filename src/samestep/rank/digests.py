"""Digests of rows and of weights, by which ranks and records are compared bit by bit."""

from __future__ import annotations

import hashlib
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from samestep.job.walk import leaves_of, text_of
from samestep.rank.shards import block_of, divided_along, full_state_dict, is_shard, place_of
from samestep.world import World

BLOCK = 1 << 17  # elements at once: a digest needs 24 bytes for each, which fit into a core's cache
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # factors that mix bits, of splitmix64
KEPT = (1 << 62) - 1  # the bits of a digest: its negative must be a number, too


def digest_rows(data: Any, rows: int) -> list[str]:
    """Returns a digest of each of the first `rows` rows of a batch, computed from the tensors' bytes.

    A tensor whose first dimension is not `rows` is part of every row's digest, and so is every value that is no tensor.
    """
    hashes = [hashlib.blake2b(digest_size=6) for _ in range(rows)]
    for leaf in leaves_of(data):
        tensor = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else None
        if tensor is not None and tensor.dim() and len(tensor) == rows:
            pieces = [_bytes(row) for row in tensor]
        else:
            pieces = [text_of(leaf).encode() if tensor is None else _bytes(tensor)] * rows
        for piece, state in zip(pieces, hashes):
            state.update(piece)
    return [state.hexdigest() for state in hashes]


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor. shape [bytes]"""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    # An expanded tensor of one element is contiguous with a stride of 0, which torch does not view as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return bytes_of(tensor).numpy().tobytes()


def state_digests(model: nn.Module) -> list[str]:
    """Returns a digest of each of a module's parameters and buffers, in the order of its state dict."""
    tensors = [value for value in full_state_dict(model).values() if isinstance(value, Tensor)]
    return [hashlib.blake2b(_bytes(t.detach().cpu().contiguous()), digest_size=8).hexdigest() for t in tensors]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that every rank holds whole; those that FSDP or DeepSpeed shard have no replicas, nor have
    those of a pipeline's stages on all ranks.

    Buffers are left out: ranks keep their own (Layout.buffers), or get rank 0's before the next forward pass.
    """
    named = ((name, p) for name, p in model.named_parameters() if not (p.is_meta or divided_along(p)))
    return {name: p.detach() for name, p in named if not is_shard(p) and not hasattr(p, "ds_id")}


def copied_parameters(model: nn.Module, world: World) -> dict[int, dict[str, Tensor]]:
    """Returns what other ranks have copies of, by place: the ranks that hold the same parts number them alike.

    Place 0 has the parameters that this rank holds whole. The others have its parts of those that the axes of a mesh
    divide: 'NAME from [row, column]' -> the part. Of `places(world)` places it returns those that hold something.
    """
    copied = {0: whole_parameters(model)}
    parameters: dict[str, Any] = dict(model.named_parameters())
    sizes = world.mesh.sizes if world.mesh else {}
    for name, parameter in parameters.items() if sizes else ():
        if parameter.is_meta or not (divided_along(parameter) or is_shard(parameter)):
            continue
        place, parts, coordinates = 0, 1, divided_at(parameter, world)
        for axis, size in sizes.items():
            parts *= size if axis in coordinates else 1
            place = place * (size + 1) + (1 + coordinates[axis] if axis in coordinates else 0)
        if (
            divided_along(parameter) or parts < world.size
        ):  # of stages, too, several ranks may have one parameter, a tied one
            copied.setdefault(place, {})[f"{name} from {[*place_of(parameter)[1]]}"] = block_of(parameter)
    return copied


def divided_at(parameter: Any, world: World) -> dict[str, int]:
    """Returns the axes along which ranks have different parts of a parameter, or different ones -> this rank's place
    there."""
    places = world.mesh.coordinates(world.rank) if world.mesh else {}
    divided = {axis: place for axis, place in places.items() if axis in divided_along(parameter)}
    if not is_shard(parameter):
        return divided
    mesh = parameter.device_mesh
    of_axes = zip(mesh.mesh_dim_names or (), parameter.placements, mesh.get_coordinate() or ())
    return divided | {axis: place for axis, placement, place in of_axes if not placement.is_replicate()}


def places(world: World) -> int:
    """Returns how many places `copied_parameters` numbers: along each axis of the mesh, whole or one of its parts."""
    return prod(size + 1 for size in (world.mesh.sizes if world.mesh else {}).values())


def digests(tensors: dict[str, Tensor]) -> list[int]:
    """Returns a digest of each tensor's bits, computed where the tensor is. One changed bit changes it."""
    return torch.stack([bits_digest(tensor) for tensor in tensors.values()]).tolist() if tensors else []


def bits_digest(tensor: Tensor) -> Tensor:
    """Adds up the elements' bits, each mixed with its place. A scalar of int64."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places = torch.arange(min(BLOCK, len(bits)), device=tensor.device).mul_(ODD[1])
    for first in range(0, len(bits), BLOCK):
        block = bits[first : first + BLOCK]
        mixed = places[: len(block)] + first * ODD[1] % KEPT
        mixed += block
        mixed *= ODD[0]
        mixed ^= mixed >> 29
        mixed *= ODD[2]
        total += mixed.sum()
    return total & KEPT
