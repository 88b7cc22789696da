"""Parameters that FSDP's first version has flattened: this rank's part of each, and its own gradients.

FSDP1 puts the parameters of a unit end to end into a flat one, of which each rank keeps an equal part, or the whole
(NO_SHARD, and shards of one rank). A forward pass uses views of the whole flat parameter, so that its hook sees the
rank's own gradient. Of torch's objects only attributes are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from samestep.recorder.sums import compress, placed

Seen = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter: its elements from `start` on, `length` of `size`. sharded: or each rank all."""

    size: int
    start: int
    length: int
    sharded: bool


class Flattened:
    """The flattened parameters of a model. hides: whether some are sharded over only some of the ranks."""

    def __init__(self, world_size: int) -> None:
        self.parts: dict[int, Part] = {}  # by the ids of what named_parameters() yields
        self.hides = False
        self._world_size = world_size
        self._clips: set[int] = set()

    def add(self, module: nn.Module, names: Mapping[int, str], seen: Seen) -> None:
        """Adds the parameters below a module. names: id -> name. Calls seen(name, gradient) with the rank's own."""
        for handle in _handles(module):
            flat, pieces = handle.flat_param, list(_pieces(handle))
            if not any(id(parameter) in names for parameter, _, _ in pieces):
                continue
            sharded = bool(handle.uses_sharded_strategy)
            if sharded and handle.process_group.size() != self._world_size:
                self.hides = True
                continue
            self.parts |= {id(parameter): part for parameter, _, part in pieces}
            slices = [(names[id(p)], start, part.size) for p, start, part in pieces if id(p) in names]
            if flat.requires_grad:
                flat.register_hook(functools.partial(_split, slices, seen))

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

    def around_clipping(self, module: nn.Module, clips: Callable[[list[Tensor], float | None], None]) -> None:
        """Calls clips(parameters, limit) before FSDP's own clip_grad_norm_."""
        if type(module).__name__ != "FullyShardedDataParallel" or id(module) in self._clips:
            return
        self._clips.add(id(module))
        clip: Any = module.clip_grad_norm_

        @functools.wraps(clip)
        def new_clip(max_norm: float, norm_type: float = 2.0) -> Tensor:
            if any(part.sharded for part in self.parts.values()):  # else torch.nn.utils clips
                clips(list(module.parameters()), float(max_norm) if float(norm_type) == 2 else None)
            norm: Tensor = clip(max_norm, norm_type)
            return norm

        module.clip_grad_norm_ = new_clip  # type: ignore[assignment]


def _handles(module: nn.Module) -> Iterator[Any]:
    for each in module.modules():
        if type(each).__name__ == "FullyShardedDataParallel" and getattr(each, "_handle", None) is not None:
            yield each._handle


def _pieces(handle: Any) -> Iterator[tuple[nn.Parameter, int, Part]]:
    """Yields (parameter, where it begins in the flat one, the rank's part) of what named_parameters() yields."""
    flat, sharded = handle.flat_param, bool(handle.uses_sharded_strategy)
    if not handle._use_orig_params:
        size = int(flat._unpadded_unsharded_size.numel())
        each = int(flat._sharded_size.numel()) if sharded else size
        start = min(handle.rank * each, size) if sharded else 0
        yield flat, 0, Part(size, start, min(each, size - start), sharded)
        return
    starts = [0, *accumulate(flat._numels_with_padding)]
    real = [start for start, padding in zip(starts, flat._is_padding_mask) if not padding]
    sizes = [n for n, padding in zip(flat._numels_with_padding, flat._is_padding_mask) if not padding]
    for parameter, start, size, of in zip(flat._params, real, sizes, flat._shard_param_infos):
        if not sharded:
            yield parameter, start, Part(size, 0, size, False)
        elif of.in_shard:
            yield parameter, start, Part(size, of.intra_param_start_idx, of.numel_in_shard, True)
        else:
            yield parameter, start, Part(size, 0, 0, True)


def _split(slices: list[tuple[str, int, int]], seen: Seen, gradient: Tensor) -> None:
    flat = gradient.detach().reshape(-1)
    for name, start, size in slices:
        seen(name, flat[start : start + size])
