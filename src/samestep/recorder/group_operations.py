"""The operations of process groups that carry a model's activations and gradients, and the inputs and outputs of its
modules."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.job.foreign import attribute_of, defines, is_a, named_parts_in, parts_in
from samestep.job.walk import known_leaves
from samestep.rank.hooks import Hooks, calling_frame
from samestep.rank.shards import block_of, is_shard
from samestep.recorder.guards import recorder_guard
from samestep.recorder.parameters import plain
from samestep.recorder.patches import in_backward
from samestep.records.call_site import CallSite
from samestep.records.divided_models import ModuleRecord, Moments, TalkRecord
from samestep.records.torch_collectives import SENDS_AND_RECEIVES, TO_ALL, WITH_HISTORY

FUNCTIONAL = "torch.distributed._functional_collectives"
POINT_TO_POINT = [function.name for function in SENDS_AND_RECEIVES if function.takes == "tensors"]
C10D = "torch.distributed.distributed_c10d"
# Whose collectives say nothing of a model that the script divides: SyncBatchNorm's, and the wrappers'. What another of
# torch's own calls, as a batch each operation in it, is noted with that.
OF_TORCH = (
    "torch.nn.",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    C10D,
    FUNCTIONAL,
)
PIPELINES = "torch.distributed.pipelining.stage"


class GroupOperations:
    """Counts the operations of process groups in training forwards and in backward passes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._in_forward = False
        self._counts: dict[tuple[int, ...], tuple[Counter[str], Counter[str], Counter[str]]] = {}

    def __bool__(self) -> bool:
        return any(forward for forward, *_ in self._counts.values())

    def attach(self, hooks: Hooks) -> None:
        """Patches the collectives."""
        for function in TO_ALL:
            hooks.attach(dist, function.name, functools.partial(self._operate, function.name))
        for name in POINT_TO_POINT:
            # A P2POp takes torch's own functions alone, which it knows by their module.
            hooks.attach(dist, name, functools.partial(self._operate, name), sys.modules[C10D])
        hooks.attach(dist, "batch_isend_irecv", self._operate_batch)
        if FUNCTIONAL in sys.modules:
            for name in functional_collectives(sys.modules[FUNCTIONAL]):
                hooks.attach(sys.modules[FUNCTIONAL], name, functools.partial(self._operate, name))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Counts what is called in the block as that of a training forward."""
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def records(self) -> list[TalkRecord]:
        return [TalkRecord([*ranks], *map(dict, counts)) for ranks, counts in sorted(self._counts.items())]

    def _operate(self, name: str, operation: Any, /, *args: Any, **kwargs: Any) -> Any:
        computes = self._in_forward or in_backward()
        if (computes or name in POINT_TO_POINT) and not torch.compiler.is_compiling():
            peers = [_peer(args, kwargs)] if name in POINT_TO_POINT else None
            caller, result = _caller(), operation(*args, **kwargs)
            # In some versions of torch the functional collectives have a gradient under each of their names.
            has_history = is_a(result, Tensor) and result.grad_fn is not None and not name.endswith(WITH_HISTORY)
            self._note(name + WITH_HISTORY * has_history, args, kwargs, peers=peers, caller=caller)
            return result
        return operation(*args, **kwargs)

    def _operate_batch(self, batch: Any, p2p_op_list: list[Any]) -> Any:
        if not torch.compiler.is_compiling():
            tensors = [operation.tensor for operation in p2p_op_list]
            peers = [operation.peer for operation in p2p_op_list]
            self._note("batch_isend_irecv", (tensors,), {}, peers=peers, caller=_caller())
        return batch(p2p_op_list)

    def _note(self, name: str, args: Any, kwargs: Any, *, peers: list[Any] | None, caller: str) -> None:
        """Notes an operation. peers: the other ranks of point-to-point operations. caller: the name of the module that
        calls."""
        # A tensor that is reduced beside a model, as a number of rows or the statistics of a loss, is no matrix.
        tensors = [leaf for leaf in known_leaves((args, kwargs)) if is_a(leaf, Tensor)]
        if caller.startswith(OF_TORCH) and not caller.startswith("torch.distributed.nn"):
            return
        if not any(tensor.is_floating_point() and tensor.dim() > 1 for tensor in tensors):
            return
        ranks = tuple(sorted({self._rank, *peers})) if peers and None not in peers else members(args, kwargs)
        if len(ranks) > 1:
            place = 0 if self._in_forward else 1 if in_backward() else 2
            self._counts.setdefault(ranks, (Counter(), Counter(), Counter()))[place][name] += 1


def functional_collectives(module: ModuleType) -> list[str]:
    """Returns the names of torch's functional collectives. module: FUNCTIONAL."""
    names = []
    for name, function in vars(module).items():
        is_public = inspect.isfunction(function) and not name.startswith(("_", "legacy_"))
        if is_public and "group" in inspect.signature(function).parameters:
            names.append(name)
    return names


def _caller() -> str:
    """Returns the name of the module that calls a collective."""
    return str(calling_frame().f_globals.get("__name__", ""))


def _peer(args: Any, kwargs: Any) -> int | None:
    """Returns the other rank of a point-to-point operation; None where it is not said."""
    for name in ("group_dst", "group_src"):
        if kwargs.get(name) is not None:
            group: Any = kwargs.get("group") or dist.group.WORLD
            return dist.get_global_rank(group, kwargs[name])
    peer: int | None = kwargs.get("dst", kwargs.get("src", args[1] if len(args) > 1 else None))
    return peer


def members(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Returns the ranks of the group that is among the arguments of an operation; of none all."""
    for value in (*kwargs.values(), *args):
        if is_a(value, dist.ProcessGroup):
            with suppress(KeyError):  # torch has not made this group
                return tuple(sorted(dist.get_process_group_ranks(value)))
            return tuple(range(value.size()))
        if type(value).__name__ == "DeviceMesh":
            return tuple(sorted(value.mesh.flatten().tolist()))
    return tuple(range(dist.get_world_size()))


class FirstForward:
    """Records the inputs and outputs of the modules in the first training forward."""

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        self.modules: list[ModuleRecord] = []
        self._is_users, self._seen = is_users, False

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Records the modules that are called in the block, if it is the first one."""
        is_first, self._seen = not self._seen, True
        # A compiled model would be compiled with the hooks.
        odd = defines(model, "_orig_mod") or attribute_of(model, "_orig_mod") is not None or PIPELINES in sys.modules
        if not is_first or odd or not dist.is_initialized():
            yield
            return
        names = {id(module): plain(name) for name, module in named_parts_in(model)}

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or _holds_sums((args, kwargs, output)):
                return
            given, returned = moments_of((args, kwargs)), moments_of(output)
            self.modules.append(ModuleRecord(names[id(module)], given, returned, self._site(module)))

        # After the hooks that a plan has put on a module, which add up or gather what it returns.
        guarded, register = recorder_guard.hook(hook), nn.Module.register_forward_hook
        handles = [register(module, guarded, with_kwargs=True) for module in parts_in(model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _site(self, module: nn.Module) -> CallSite | None:
        """Returns the line of the user's code where a module's forward begins."""
        code = getattr(type(module).forward, "__code__", None)
        if code is None or not self._is_users(code.co_filename):
            return None
        return CallSite(code.co_filename, code.co_firstlineno, code.co_qualname if hasattr(code, "co_qualname") else "")


def _holds_sums(data: Any) -> bool:
    """Returns whether a tree holds DTensors that are still to be added up over ranks: a part of one tells nothing of
    the sum's squares."""
    return any(placement.is_partial() for leaf in known_leaves(data) if is_shard(leaf) for placement in leaf.placements)


def moments_of(data: Any) -> Moments:
    """Returns sums over all elements of the tensors of floating point and of numbers in a tree; of a DTensor over those
    of this rank's piece."""
    count, sums = 0, torch.zeros(4, dtype=torch.float64)
    for leaf in map(_held, known_leaves(data)):
        if is_a(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() and leaf.dtype != torch.bool:
            values = leaf.detach().cpu().double() if not leaf.is_complex() else torch.view_as_real(leaf).cpu().double()
            count += values.numel()
            sums += torch.stack([values.sum(), values.abs().sum(), (values**2).sum(), (values**3).sum()])
    return Moments(count, sums.tolist())


def _held(leaf: Any) -> Any:
    """Returns what this rank holds of a tensor."""
    return block_of(leaf) if is_shard(leaf) else leaf
