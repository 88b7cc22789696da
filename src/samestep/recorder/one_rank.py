"""Runs a script that is written for several ranks on one rank in a replay: one on every dimension of its meshes."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from samestep.rank.hooks import Hooks, called_by_torch
from samestep.rank.shards import is_shard
from samestep.records.torch_collectives import TO_ALL, TorchCollective

DEEPSPEED_SETTINGS = "deepspeed.runtime.config"
# The first parameters of torch.distributed.init_process_group, which a script may give by their places.
INIT_PROCESS_GROUP = ("backend", "init_method", "timeout", "world_size")
TRAINERS = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
)
LOSSES = ("cross_entropy", "nll_loss", "log_softmax")  # the operations that torch's loss_parallel computes on pieces


def make_meshes_of_one_rank(hooks: Hooks, made: Callable[[list[int]], None] = lambda ranks: None) -> None:
    """Makes every device mesh that the script asks for one of a single rank, as a replay has no other.

    made: is called with the ranks of each mesh that the script has asked for.
    """
    init = device_mesh.init_device_mesh

    def new_init(init: Any, device_type: str, mesh_shape: Any, *args: Any, **kwargs: Any) -> Any:
        made([*range(math.prod(mesh_shape))])
        return init(device_type, (1,) * len(mesh_shape), *args, **kwargs)

    def new_make(make: Any, self: Any, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        if mesh is not None:
            mesh = torch.as_tensor(mesh)
            made(mesh.flatten().tolist())
            mesh = torch.zeros((1,) * mesh.dim(), dtype=torch.int)
        make(self, device_type, mesh, *args, **kwargs)

    # Wherever torch exports it: torch.distributed, and torch.distributed._tensor.device_mesh in older scripts.
    importlib.import_module("torch.distributed._tensor.device_mesh")
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]
    modules = [module for module in modules if getattr(module, "init_device_mesh", None) is init]
    hooks.attach(modules[0], "init_device_mesh", new_init, *modules[1:])
    hooks.attach(device_mesh.DeviceMesh, "__init__", new_make)


def make_trainers_of_one_rank(hooks: Hooks) -> None:
    """Gives Lightning's Trainer and Fabric one device of one node, whatever number the script has written."""

    def new_init(init: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        numbers = {name: 1 for name in ("devices", "num_nodes") if name in kwargs}
        init(trainer, *args, **kwargs | numbers)

    for module, owner in TRAINERS:
        hooks.attach_after_import(module, owner, "__init__", new_init)


def refuse_groups_of_several(hooks: Hooks, refuse: Callable[[int], None]) -> None:
    """Calls refuse(ranks) where the script opens a process group of as many ranks as it says itself: in one process it
    would wait for others that never come, and its numbers would be those of several ranks."""

    def new_init(init: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = (dict(zip(INIT_PROCESS_GROUP, args)) | kwargs).get("world_size", -1)
        if ranks > 1:
            refuse(ranks)
        return init(*args, **kwargs)

    c10d = sys.modules["torch.distributed.distributed_c10d"]
    hooks.attach(torch.distributed, "init_process_group", new_init, c10d)


class WholeLosses(TorchFunctionMode):
    """Computes losses of full tensors in place of DTensors.

    lone: how many times a log_softmax with a gradient was followed by no nll_loss, so far.
    """

    lone = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pieces = [leaf for leaf in tree_leaves((args, kwargs)) if is_shard(leaf)]
        name = getattr(func, "__name__", "")
        if name not in LOSSES or not pieces:
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and name != "cross_entropy":
            WholeLosses.lone += 1 if name == "log_softmax" else -1
        args, kwargs = tree_map(lambda leaf: leaf.full_tensor() if is_shard(leaf) else leaf, (args, kwargs))
        tensor = importlib.import_module("torch.distributed.tensor")
        # A DTensor, as torch's own kernels return: the script may ask it for the full tensor.
        replicated = [tensor.Replicate()] * pieces[0].device_mesh.ndim
        return tensor.DTensor.from_local(func(*args, **kwargs), pieces[0].device_mesh, replicated, run_check=False)


def leave_losses_whole(hooks: Hooks) -> None:
    """Lets `loss_parallel` compute whole losses: its kernels are for pieces of the classes, and one process has all."""
    loss: Any = importlib.import_module("torch.distributed.tensor.parallel.loss")
    entered: list[ExitStack] = []

    def enable(_: Any) -> None:
        entered.append(ExitStack())
        entered[-1].enter_context(WholeLosses())

    def disable(_: Any) -> None:
        entered.pop().close()

    if hasattr(loss, "_enable_custom_loss_ops") and hasattr(loss, "_disable_custom_loss_ops"):
        hooks.attach(loss, "_enable_custom_loss_ops", enable)
        hooks.attach(loss, "_disable_custom_loss_ops", disable)


class GatheredWithHistory:
    """Returns, in place of a gathered tensor, the tensor that the only rank has given, with its graph.

    torch's own collectives return tensors that autograd does not know. On several ranks the gradient of what they
    gather is lost; one process computes with the tensor itself. kept: how many were handed out with their history.
    used: whether a gradient has come back by one of them; what is gathered to be printed has none.
    """

    def __init__(self) -> None:
        self.kept, self.used = 0, False

    def attach(self, hooks: Hooks) -> None:
        """Patches the collectives that return other tensors than they are given."""
        for collective in TO_ALL:
            if not collective.is_in_place and hasattr(torch.distributed, collective.name):
                hooks.attach(torch.distributed, collective.name, self._keeping(collective))

        def new_numpy(numpy: Any, tensor: Tensor, *, force: bool = False) -> Any:
            # On several ranks the result has no graph, and torch gives its array.
            return numpy(tensor.detach() if self.kept else tensor, force=force)

        hooks.attach(Tensor, "numpy", new_numpy)

    def _keeping(self, function: TorchCollective) -> Callable[..., Any]:
        signature = inspect.signature(getattr(torch.distributed, function.name))

        def new_collective(collective: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return collective(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            outputs, inputs = (tree_leaves(given.arguments[name]) for name in (function.received, function.sent))
            for output in outputs:
                # A buffer of the script, which had the graph of the step before.
                if not output.is_leaf and not output._is_view():
                    output.detach_()
            # Some of torch's collectives give what they return a history that hands no gradient back.
            given.arguments[function.sent] = tree_map(torch.detach, given.arguments[function.sent])
            work = collective(*given.args, **given.kwargs)
            self._keep(outputs, inputs)
            return work

        return new_collective

    def _keep(self, outputs: list[Any], inputs: list[Any]) -> None:
        if len(outputs) != 1 or len(inputs) != 1 or not inputs[0].requires_grad or is_shard(inputs[0]):
            return
        (output,), (source,) = outputs, inputs
        # torch refuses a view with a graph where a collective is to write into it again.
        if output._is_view() or output.requires_grad or output.numel() != source.numel():
            return
        output.copy_(source.view_as(output))
        output.register_hook(self._use)
        self.kept += 1

    def _use(self, gradient: Tensor) -> None:
        self.used = True


def make_groups_of_one_rank(
    hooks: Hooks, made: Callable[[Any, list[int] | None], None] = lambda group, ranks: None
) -> None:
    """Makes each process group that the script asks for one of the only rank, unless it is one of others alone.

    made: is called with each group, and the ranks that the script has asked for; None for all of them.
    """
    groups: Any = sys.modules["torch.distributed.distributed_c10d"]

    def new_new_group(new_group: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and 0 not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        group = new_group(None if ranks is None else [0], *args, **kwargs)
        made(group, None if ranks is None else [*ranks])
        return group

    def new_enumeration(_: Any, ranks_per_subgroup_list: Any, *args: Any, **kwargs: Any) -> Any:
        known = {"timeout", "backend", "pg_options", "group_desc"}
        ranks = next((ranks for ranks in ranks_per_subgroup_list if 0 in ranks), [0])
        return groups.new_group(ranks, **{name: value for name, value in kwargs.items() if name in known}), [None]

    def new_subgroups(_: Any, group_size: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        return groups.new_subgroups_by_enumeration([[*range(group_size or 1)]], **kwargs)

    hooks.attach(torch.distributed, "new_group", new_new_group, groups)
    hooks.attach(torch.distributed, "new_subgroups_by_enumeration", new_enumeration, groups)
    hooks.attach(torch.distributed, "new_subgroups", new_subgroups, groups)


def tell_ranks(hooks: Hooks, number: int, ranks_of: Callable[[Any], list[int] | None] = lambda group: None) -> None:
    """Tells the script that there are so many ranks, where it cannot run as one: as one that divides them by the size
    of its tensor-parallel group. torch knows that there is one.

    ranks_of: returns the ranks that a group is told to have; None where it has those that there are.
    """
    groups: Any = sys.modules["torch.distributed.distributed_c10d"]

    def told(group: Any) -> list[int] | None:
        return None if called_by_torch() else ranks_of(group)

    def new_size(size: Any, group: Any = None) -> int:
        if group is None and not called_by_torch():
            return number
        ranks = told(group)
        return int(size(group)) if ranks is None else len(ranks)

    def new_size_of(size_there: Any, group: Any) -> int:
        ranks = told(group)
        return int(size_there(group)) if ranks is None else len(ranks)

    def new_ranks(ranks_there: Any, group: Any) -> list[int]:
        ranks = told(group)
        return [*ranks_there(group)] if ranks is None else [*ranks]

    def new_rendezvous(rendezvous: Any, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        return rendezvous(url, 0, 1, **kwargs)

    os.environ["WORLD_SIZE"] = str(number)
    hooks.attach(torch.distributed, "get_world_size", new_size)
    hooks.attach(torch.distributed, "get_process_group_ranks", new_ranks)
    hooks.attach(groups, "rendezvous", new_rendezvous)
    hooks.attach(groups.ProcessGroup, "size", new_size_of)


def allow_batches_of_all_ranks(hooks: Hooks) -> None:
    """Lets DeepSpeed's settings name the batch of all ranks beside that of one, which the only rank is fed with."""
    hooks.attach_after_import(DEEPSPEED_SETTINGS, "DeepSpeedConfig", "_batch_assertion", lambda _, self: None)
