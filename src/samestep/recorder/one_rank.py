"""What a replay makes of a script that is written for a number of ranks: one rank, on every dimension of its meshes."""

from __future__ import annotations

import functools
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

from samestep.rank.shards import is_shard
from samestep.recorder.patches import after_import

DEEPSPEED_SETTINGS = "deepspeed.runtime.config"
# collective -> its arguments with what is received, and with what is sent.
OUT_OF_PLACE = {
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
}
LOSSES = ("cross_entropy", "nll_loss", "log_softmax")  # what torch's loss_parallel computes of pieces


def make_meshes_of_one_rank(made: Callable[[list[int]], None] = lambda ranks: None) -> None:
    """Makes every device mesh that the script asks for one of a single rank, as a replay has no other.

    made: is called with the ranks of each mesh that the script has asked for.
    """
    init, kind = device_mesh.init_device_mesh, device_mesh.DeviceMesh
    make = kind.__init__

    @functools.wraps(init)
    def new_init(device_type: str, mesh_shape: Any, *args: Any, **kwargs: Any) -> Any:
        made([*range(math.prod(mesh_shape))])
        return init(device_type, (1,) * len(mesh_shape), *args, **kwargs)

    @functools.wraps(make)
    def new_make(self: Any, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        if mesh is not None:
            mesh = torch.as_tensor(mesh)
            made(mesh.flatten().tolist())
            mesh = torch.zeros((1,) * mesh.dim(), dtype=torch.int)
        make(self, device_type, mesh, *args, **kwargs)

    # Wherever torch exports it: torch.distributed, and torch.distributed._tensor.device_mesh in older scripts.
    importlib.import_module("torch.distributed._tensor.device_mesh")
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]:
        if getattr(module, "init_device_mesh", None) is init:
            module.init_device_mesh = new_init  # type: ignore[attr-defined]
    kind.__init__ = new_make  # type: ignore[method-assign]


class WholeLosses(TorchFunctionMode):
    """Computes losses of whole tensors, where a script has them of DTensors.

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
        # A DTensor, as torch's own kernels return: what follows may ask it for its whole.
        whole = [tensor.Replicate()] * pieces[0].device_mesh.ndim
        return tensor.DTensor.from_local(func(*args, **kwargs), pieces[0].device_mesh, whole, run_check=False)


def leave_losses_whole() -> None:
    """Lets `loss_parallel` compute whole losses: its kernels are for pieces of the classes, and one process has all."""
    loss: Any = importlib.import_module("torch.distributed.tensor.parallel.loss")
    entered: list[ExitStack] = []

    def enable() -> None:
        entered.append(ExitStack())
        entered[-1].enter_context(WholeLosses())

    def disable() -> None:
        entered.pop().close()

    if hasattr(loss, "_enable_custom_loss_ops") and hasattr(loss, "_disable_custom_loss_ops"):
        loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enable, disable


class GatheredWithHistory:
    """Hands out what the only rank gathers as what it is: the tensor that was given, with its history.

    torch's own collectives return tensors that autograd does not know. On several ranks the gradient of what they
    gather is lost; one process computes with the tensor itself. kept: how many were handed out with their history.
    used: whether a gradient has come back by one of them; what is gathered to be printed has none.
    """

    def __init__(self) -> None:
        self.kept, self.used = 0, False

    def attach(self) -> None:
        """Patches the collectives that return other tensors than they are given."""
        for name, (received, sent) in OUT_OF_PLACE.items():
            if hasattr(torch.distributed, name):
                self._patch(name, received, sent)
        numpy = Tensor.numpy

        @functools.wraps(numpy)
        def new_numpy(tensor: Tensor, *, force: bool = False) -> Any:
            # On several ranks what is computed of it has no history, and torch gives its array.
            return numpy(tensor.detach() if self.kept else tensor, force=force)

        Tensor.numpy = new_numpy  # type: ignore[method-assign,assignment]

    def _patch(self, name: str, received: str, sent: str) -> None:
        collective = getattr(torch.distributed, name)
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def new_collective(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return collective(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            outputs, inputs = tree_leaves(given[received]), tree_leaves(given[sent])
            for output in outputs:
                # A buffer of the script's, which had the history of the step before.
                if not output.is_leaf and not output._is_view():
                    output.detach_()
            work = collective(*args, **kwargs)
            self._keep(outputs, inputs)
            return work

        setattr(torch.distributed, name, new_collective)

    def _keep(self, outputs: list[Any], inputs: list[Any]) -> None:
        if len(outputs) != 1 or len(inputs) != 1 or not inputs[0].requires_grad or is_shard(inputs[0]):
            return
        (output,), (whole,) = outputs, inputs
        # torch refuses a view with a history where a collective is to write into it again.
        if output._is_view() or output.requires_grad or output.numel() != whole.numel():
            return
        output.copy_(whole.view_as(output))
        output.register_hook(self._use)
        self.kept += 1

    def _use(self, gradient: Tensor) -> None:
        self.used = True


def make_groups_of_one_rank(made: Callable[[Any, list[int] | None], None] = lambda group, ranks: None) -> None:
    """Makes each process group that the script asks for one of the only rank, unless it is one of others alone.

    made: is called with each group, and the ranks that the script has asked for; None for all of them.
    """
    groups: Any = sys.modules["torch.distributed.distributed_c10d"]
    new_group = groups.new_group

    @functools.wraps(new_group)
    def new_new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and 0 not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        group = new_group(None if ranks is None else [0], *args, **kwargs)
        made(group, None if ranks is None else [*ranks])
        return group

    def new_enumeration(ranks_per_subgroup_list: Any, *args: Any, **kwargs: Any) -> Any:
        known = {"timeout", "backend", "pg_options", "group_desc"}
        ranks = next((ranks for ranks in ranks_per_subgroup_list if 0 in ranks), [0])
        return new_new_group(ranks, **{name: value for name, value in kwargs.items() if name in known}), [None]

    def new_subgroups(group_size: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_enumeration([[*range(group_size or 1)]], **kwargs)

    torch.distributed.new_group = groups.new_group = new_new_group
    torch.distributed.new_subgroups_by_enumeration = groups.new_subgroups_by_enumeration = new_enumeration
    torch.distributed.new_subgroups = groups.new_subgroups = new_subgroups


def called_by_torch() -> bool:
    """Whether torch itself calls the patched function that asks, and counts the ranks that there are. Its collectives
    with a gradient call the others as a script does."""
    frame = sys._getframe(1)
    while (caller := str(frame.f_globals.get("__name__", ""))).startswith("samestep.") and frame.f_back:
        frame = frame.f_back
    return caller.partition(".")[0] == "torch" and caller != "torch.distributed.nn.functional"


def tell_ranks(number: int, ranks_of: Callable[[Any], list[int] | None] = lambda group: None) -> None:
    """Tells the script that there are so many ranks, where it cannot run as one: as one that divides them by the size
    of its tensor-parallel group. torch knows that there is one.

    ranks_of: returns the ranks that a group is told to have; None where it has those that there are.
    """
    groups: Any = sys.modules["torch.distributed.distributed_c10d"]
    size, rendezvous, ranks_there = groups.get_world_size, groups.rendezvous, groups.get_process_group_ranks
    size_there = groups.ProcessGroup.size

    def told(group: Any) -> list[int] | None:
        return None if called_by_torch() else ranks_of(group)

    @functools.wraps(size)
    def new_size(group: Any = None) -> int:
        if group is None and not called_by_torch():
            return number
        ranks = told(group)
        return int(size(group)) if ranks is None else len(ranks)

    def new_size_of(group: Any) -> int:
        ranks = told(group)
        return int(size_there(group)) if ranks is None else len(ranks)

    @functools.wraps(ranks_there)
    def new_ranks(group: Any) -> list[int]:
        ranks = told(group)
        return [*ranks_there(group)] if ranks is None else [*ranks]

    @functools.wraps(rendezvous)
    def new_rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        return rendezvous(url, 0, 1, **kwargs)

    os.environ["WORLD_SIZE"] = str(number)
    torch.distributed.get_world_size, groups.rendezvous = new_size, new_rendezvous
    torch.distributed.get_process_group_ranks, groups.ProcessGroup.size = new_ranks, new_size_of


def allow_batches_of_all_ranks() -> None:
    """Lets DeepSpeed's settings name the batch of all ranks beside that of one, which the only rank is fed with."""

    def patch() -> None:
        settings: Any = sys.modules[DEEPSPEED_SETTINGS].DeepSpeedConfig
        settings._batch_assertion = lambda self: None

    after_import(DEEPSPEED_SETTINGS, patch)
