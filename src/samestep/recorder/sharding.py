"""Reads a rank's parts of sharded parameters: by FSDP2 (DTensors), FSDP's first version, and DeepSpeed's ZeRO.

A rank holds a part of each parameter. Its compressed sums are those of the whole with zeros elsewhere; added up over
the ranks, they are the whole's. Of the libraries' objects only attributes are read.

- FSDP2: the rank's own gradients are seen on the unsharded parameters, which exist during a forward pass.
- FSDP1 puts the parameters of a unit end to end into a flat one, of which each rank keeps an equal part, or the whole
  (NO_SHARD, and shards of one rank). A forward pass uses views of the whole flat parameter, so that its hook sees the
  rank's own gradient.
- DeepSpeed: in ZeRO's stages 1 and 2 a rank keeps the reduced gradients of its part of all parameters, in stage 3 of
  its part of each. They are read before the engine's step, which clears them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from samestep.job.foreign import attribute_of, attributes_of, is_a, parameters_in, parts_in
from samestep.rank.digests import digests
from samestep.rank.hooks import Hooks
from samestep.rank.shards import block_of, fsdp_params_of, is_shard, place_of
from samestep.recorder.guards import recorder_guard
from samestep.recorder.patches import HUGE
from samestep.recorder.window import compress

NONE = object()
OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
OnGradient = Callable[[str, Tensor], None]  # is called with a parameter's name and this rank's own gradient
OnClip = Callable[[list[Tensor], float | None], None]  # with what is clipped, and the greatest norm


def is_sharded(parameter: Any) -> bool:
    """Returns whether a rank holds a part of a parameter: by FSDP2, or by stage 3 of DeepSpeed's ZeRO."""
    return is_shard(parameter) or is_partitioned(parameter)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the digest of what this rank holds of each: its part of a sharded one, else the whole."""
    held = {
        name: _part_held(tensor) if is_partitioned(tensor) else block_of(tensor) for name, tensor in tensors.items()
    }
    return dict(zip(held, digests(held))) if held else {}


def values_held(parameter: Any) -> Tensor:
    """Returns the values that this rank holds of a parameter; of one that stage 3 shards as they lie end to end."""
    if not is_partitioned(parameter):
        return block_of(parameter)
    return _part_held(parameter)[: _place_in_stage_3(parameter)[1]]


def load_whole(parameter: Any, full_tensor: Tensor) -> None:
    """Gives a parameter of which this process holds all its values."""
    held = values_held(parameter)
    held.copy_(full_tensor.view(held.shape))
    # Small ones stay whole beside their part.
    if is_partitioned(parameter) and parameter.data.numel() == parameter.ds_numel:
        parameter.data.copy_(full_tensor)


def place_in_whole(parameter: Any) -> tuple[tuple[int, ...], list[Tensor]] | None:
    """Returns the shape of a sharded parameter, and the indices of this rank's values in it; None of others."""
    if is_shard(parameter):
        return tuple(parameter.shape), indices_of(parameter)
    if is_partitioned(parameter):
        start, length = _place_in_stage_3(parameter)
        return tuple(parameter.ds_shape), [torch.arange(start, start + length)]
    return None


def whole_of(parts: Sequence[tuple[Tensor, list[Tensor]]], shape: Sequence[int]) -> Tensor:
    """Returns a tensor put together of (values, their indices in it)."""
    full_tensor = parts[0][0].new_zeros(shape)
    for values, indices in parts:
        flat = len(indices) == 1
        (full_tensor.view(-1) if flat else full_tensor)[grid_of(indices)] = values
    return full_tensor


def placed(part: Tensor, size: int, start: int, length: int) -> Tensor:
    """Returns `size` zeros, with the first `length` elements of a part from `start` on."""
    zeros = torch.zeros(size, dtype=part.dtype, device=part.device)
    zeros[start : start + length] = part.detach().reshape(-1)[:length]
    return zeros


# FSDP2 and tensor parallelism


def is_whole_in_world(tensor: Any, world_size: int) -> bool:
    """Returns whether a tensor is sharded, and each element of it on exactly one rank of the world."""
    sharded = is_shard(tensor) and all(placement.is_shard() for placement in tensor.placements)
    return sharded and int(tensor.device_mesh.size()) == world_size


def splits_model(module: nn.Module) -> bool:
    """Returns whether parameters below are sharded by something else than FSDP2, or beside it: a tensor-parallel model,
    whose ranks compute parts of the same rows."""
    by_fsdp = {id(parameter) for unit in _fsdp2_modules(module) for parameter in parameters_in(unit)}
    sharded: list[Any] = [parameter for parameter in parameters_in(module) if is_shard(parameter)]
    return any(
        id(parameter) not in by_fsdp or sum(placement.is_shard() for placement in parameter.placements) > 1
        for parameter in sharded
    )


def sums_of_part(tensor: Any) -> Tensor:
    """Returns the compressed sums of a tensor; of a sharded one, this rank's part of them."""
    return compress(among_zeros(tensor))


def among_zeros(tensor: Any) -> Tensor:
    """Returns a tensor; of a sharded one, this rank's part among zeros."""
    if not is_shard(tensor):
        plain: Tensor = tensor
        return plain
    block = block_of(tensor)
    zeros = block.new_zeros(tensor.shape)
    zeros[grid_of(indices_of(tensor))] = block
    return zeros


def indices_of(tensor: Any) -> list[Tensor]:
    """Returns which elements along each dimension of a DTensor this rank holds: of fused weights, as gate and up in
    one, it may be a piece of each."""
    held, place = [torch.arange(size) for size in tensor.shape], tensor.device_mesh.get_coordinate()
    for number, placement in enumerate(tensor.placements):
        if hasattr(placement, "dim"):
            # Of a strided shard each of several parts is shared out.
            parts = _chunks(held[placement.dim], getattr(placement, "split_factor", 1))
            shares = [_chunks(part, tensor.device_mesh.size(number))[place[number]] for part in parts]
            held[placement.dim] = torch.cat(shares)
    if [*map(len, held)] != [*tensor._local_tensor.shape]:
        held = [torch.arange(start, start + length) for length, start in zip(*place_of(tensor))]
    return held


def _chunks(indices: Tensor, count: int) -> list[Tensor]:
    """Returns pieces as torch shares a dimension out: the last ones may be shorter, or empty."""
    chunks = [*indices.chunk(count)]
    return [*chunks, *[indices[:0]] * (count - len(chunks))]


def grid_of(indices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns what picks the elements with these indices along each dimension out of a tensor."""
    if all(len(along) and int(along[-1] - along[0]) == len(along) - 1 for along in indices):
        return tuple(slice(int(along[0]), int(along[-1]) + 1) for along in indices)
    return torch.meshgrid(*indices, indexing="ij")


def unsharded(module: nn.Module) -> dict[int, Tensor]:
    """Returns, by their ids, what stands for FSDP2's sharded parameters below in a forward pass; its storage is freed
    afterwards. Other plain parameters are a rank's own: those that FSDP was told to ignore, or that came later."""
    units = _fsdp2_modules(module)
    # The parameters of a tensor-parallel model are DTensors, too.
    held = [p for unit in units for p in fsdp_params_of(unit) if hasattr(p, "_unsharded_param")]
    return {id(p._unsharded_param): p._unsharded_param for p in held}


def data_dimensions(module: nn.Module) -> dict[int, int]:
    """Returns the id of each parameter that FSDP2 has sharded below a module -> how many dimensions its mesh has."""
    params = [p for unit in _fsdp2_modules(module) for p in fsdp_params_of(unit)]
    # FSDP2 takes over what was loaded since then in the first forward pass alone.
    present = [p._module_info.module._parameters.get(p._module_info.param_name) for p in params]
    return {
        id(sharded): int(p.mesh_info.mesh.ndim)
        for p, loaded in zip(params, present)
        for sharded in (p.sharded_param, loaded)
        if is_shard(sharded)
    }


def _fsdp2_modules(module: nn.Module) -> list[nn.Module]:
    return [part for part in parts_in(module) if "FSDPModule" in (kind.__name__ for kind in type(part).__mro__)]


def hook_unsharded(
    module: nn.Module, names: Mapping[int, str], hooked: dict[int, Tensor], on_gradient: OnGradient
) -> None:
    """Calls on_gradient with each gradient that this rank computes of the sharded parameters below `module`.

    names: id of a sharded parameter -> its name. hooked: the unsharded parameters, by their ids, are added to it.
    """

    def before_forward(places: Sequence[tuple[nn.Module, str, str]], *_: Any) -> None:
        for part, attribute, name in places:
            parameter = attribute_of(part, attribute)
            if id(parameter) not in names and parameter.requires_grad and id(parameter) not in hooked:
                hooked[id(parameter)] = parameter
                parameter.register_hook(recorder_guard.hook(functools.partial(on_gradient, name)))

    def places_in(part: nn.Module) -> list[tuple[nn.Module, str, str]]:
        held = attributes_of(part)["_parameters"].items()
        return [(part, attribute, names[id(parameter)]) for attribute, parameter in held if id(parameter) in names]

    # A unit gathers also what it uses without calling the part that holds it, as attention its last layer's weights.
    units = _fsdp2_modules(module)
    places = [(unit, [place for part in parts_in(unit) for place in places_in(part)]) for unit in units]
    places += [(part, places_in(part)) for part in parts_in(module) if all(part is not unit for unit in units)]
    for part, places_of_part in places:
        if places_of_part:
            part.register_forward_pre_hook(recorder_guard.hook(functools.partial(before_forward, places_of_part)))


# FSDP's first version


@dataclass(frozen=True)
class FlatPart:
    """A rank's part of a flattened parameter: `length` elements of `size`, from `start` on. sharded: False: each rank
    has all."""

    size: int
    start: int
    length: int
    sharded: bool


class Flattened:
    """The flattened parameters of a model. hides: whether some are sharded over only some of the ranks."""

    def __init__(self, world_size: int) -> None:
        self.parts: dict[int, FlatPart] = {}  # by the ids of what named_parameters() yields
        self.hides = False
        self._world_size = world_size
        self._patched: set[int] = set()  # ids of modules whose clip_grad_norm_ is patched

    def add(self, module: nn.Module, names: Mapping[int, str], on_gradient: OnGradient) -> None:
        """Adds the parameters below a module, and calls on_gradient with the rank's own. names: id -> name."""
        for handle in _handles(module):
            flat, pieces = handle.flat_param, list(_pieces(handle))
            if not any(id(parameter) in names for parameter, _, _ in pieces):
                continue
            if handle.uses_sharded_strategy and handle.process_group.size() != self._world_size:
                self.hides = True
                continue
            self.parts |= {id(parameter): part for parameter, _, part in pieces}
            slices = [(names[id(p)], start, part.size) for p, start, part in pieces if id(p) in names]
            if flat.requires_grad:
                flat.register_hook(recorder_guard.hook(functools.partial(_split, slices, on_gradient)))

    def shards(self, names: Mapping[int, str]) -> list[str]:
        """Returns the names of those each element of which is on one rank."""
        return [name for key, name in names.items() if key in self.parts and self.parts[key].sharded]

    def gradients(self, parameters: Mapping[str, nn.Parameter], computed: Container[str]) -> dict[str, Tensor]:
        """Returns the compressed sums of this rank's part of each gradient that lies in .grad now.

        parameters: by their names; others are left out. computed: names of those whose gradient the rank has computed,
        which is zero where it has no part of them.
        """
        sums = {}
        for name, parameter in parameters.items():
            part, gradient = self.parts.get(id(parameter)), parameter.grad
            if part is None or (gradient is None and (part.length or name not in computed)):
                continue
            if gradient is not None and not part.sharded:
                sums[name] = compress(gradient)
                continue
            held = parameter.new_zeros(0) if gradient is None else gradient
            sums[name] = compress(placed(held, part.size, part.start, part.length))
        return sums

    def are_shared_out(self) -> bool:
        """Returns whether each rank holds other pieces of the parameters."""
        return any(part.sharded for part in self.parts.values())

    def patch_clipping(self, hooks: Hooks, module: nn.Module, on_clip: OnClip) -> None:
        """Calls on_clip before FSDP's own clip_grad_norm_."""
        if type(module).__name__ != "FullyShardedDataParallel" or id(module) in self._patched:
            return
        self._patched.add(id(module))

        def new_clip(clip: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            # Otherwise torch.nn.utils clips.
            if self.are_shared_out() and max_norm < HUGE:
                on_clip(list(parameters_in(module)), float(max_norm) if float(norm_type) == 2 else None)
            norm: Tensor = clip(max_norm, norm_type)
            return norm

        hooks.attach(module, "clip_grad_norm_", new_clip)


def _handles(module: nn.Module) -> Iterator[Any]:
    for part in parts_in(module):
        if type(part).__name__ == "FullyShardedDataParallel" and attribute_of(part, "_handle") is not None:
            yield part._handle


def _pieces(handle: Any) -> Iterator[tuple[nn.Parameter, int, FlatPart]]:
    """Yields (parameter, where it begins in the flat one, the rank's part) of what named_parameters() yields."""
    flat, sharded = handle.flat_param, bool(handle.uses_sharded_strategy)
    if not handle._use_orig_params:
        size = int(flat._unpadded_unsharded_size.numel())
        length = int(flat._sharded_size.numel()) if sharded else size
        start = min(handle.rank * length, size) if sharded else 0
        yield flat, 0, FlatPart(size, start, min(length, size - start), sharded)
        return
    starts = [0, *accumulate(flat._numels_with_padding)]
    real = [start for start, padding in zip(starts, flat._is_padding_mask) if not padding]
    sizes = [size for size, padding in zip(flat._numels_with_padding, flat._is_padding_mask) if not padding]
    for parameter, start, size, shard in zip(flat._params, real, sizes, flat._shard_param_infos):
        if not sharded:
            yield parameter, start, FlatPart(size, 0, size, False)
        elif shard.in_shard:
            yield parameter, start, FlatPart(size, shard.intra_param_start_idx, shard.numel_in_shard, True)
        else:
            yield parameter, start, FlatPart(size, 0, 0, True)


def _split(slices: list[tuple[str, int, int]], on_gradient: OnGradient, gradient: Tensor) -> None:
    flat = gradient.detach().reshape(-1)
    for name, start, size in slices:
        on_gradient(name, flat[start : start + size])


# DeepSpeed


def is_engine(module: nn.Module) -> bool:
    """Returns whether a module is DeepSpeed's engine, which wraps a model."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


def patch_engine_step(hooks: Hooks, engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls before() and after() around each step that the engine takes, after the last micro-batch."""

    def new_take(take: Any, *args: Any, **kwargs: Any) -> None:
        before()
        take(*args, **kwargs)
        after()

    hooks.attach(engine, "_take_model_step", new_take)


def optimizer_of_engine(engine: Any) -> Any:
    """Returns torch's optimizer below the engine's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def scale_of_engine(engine: Any) -> float:
    """Returns the factor by which the engine has multiplied its losses."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def is_partitioned(parameter: Any) -> bool:
    """Returns whether a parameter is sharded by ZeRO's stage 3."""
    return hasattr(parameter, "ds_tensor")


def _part_held(parameter: Any) -> Tensor:
    """Returns this rank's part of a parameter that is sharded by ZeRO's stage 3."""
    part: Tensor = parameter.ds_tensor
    return part.detach()


def _place_in_stage_3(parameter: Any) -> tuple[int, int]:
    """Returns (start, length) of this rank's part of a parameter, without what its end is filled up with."""
    size, length = parameter.ds_numel, parameter.ds_tensor.numel()
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * length, size)
    return start, min(length, size - start)


def refresh_engine(engine: Any) -> bool:
    """Lets an engine's optimizer take over the weights that its model has been given; returns whether it can."""
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()
    return refresh is not None or is_a(engine.optimizer, torch.optim.Optimizer)


def engine_gradients(engine: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the compressed gradients, of which those that are shared out are this rank's part, and names of these."""
    gradients, scale = raw_engine_gradients(engine, parameters), scale_of_engine(engine)
    shared = [n for n, p in parameters.items() if is_partitioned(p) or getattr(p, "_hp_mapping", NONE) is not NONE]
    return {name: compress(gradient) / scale for name, gradient in gradients.items()}, shared


def raw_engine_gradients(engine: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients before the engine's step; of those that are shared out this rank's part, among zeros."""
    gradients = {}
    for name, parameter in parameters.items():
        if is_partitioned(parameter):
            gradients[name] = _of_stage_3(engine.optimizer, parameter)
        elif getattr(parameter, "_hp_mapping", NONE) is not NONE:
            gradients[name] = _of_stages_1_and_2(parameter)
        elif parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients


def _of_stage_3(optimizer: Any, parameter: Any) -> Tensor:
    part = getattr(optimizer, OF_STAGE_3)[parameter.ds_id]
    return placed(part, parameter.ds_numel, *_place_in_stage_3(parameter))


def _of_stages_1_and_2(parameter: Any) -> Tensor:
    mapping, size = parameter._hp_mapping, parameter.numel()
    # Other ranks hold all of this parameter.
    if mapping is None:
        return torch.zeros(size, device=parameter.device)
    part = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    address = mapping.lp_fragment_address
    # The whole gradient is kept, of which this rank's part counts.
    if part.numel() == size:
        part = part.reshape(-1)[address.start : address.start + address.numel]
    return placed(part, size, address.start, address.numel)
