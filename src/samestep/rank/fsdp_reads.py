"""Watches what a job reads of the parameters that FSDP gathers for a unit's forward and frees after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node, tree_leaves

from samestep.errors import Refused
from samestep.job import MicroBatch
from samestep.job.walk import items_of, mapped_tensors, with_items
from samestep.world.imports import is_users_code


class FSDPReads(TorchDispatchMode):
    """Lets a unit return its parameters; as a context, refuses other reads of them outside of its forward.

    A unit that returns a parameter, or a view of it, returns a copy, because the original is freed. As a context it
    looks at each operation, which takes time: use it for a first step. Make it before the units are sharded: its hooks
    must come before FSDP's. units: the modules that are sharded, the model among them. remedy: what helps against such
    a read.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], remedy: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._remedy = model, remedy
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._steps: dict[int, int] = {}  # phase -> its first step
        self._gathered: dict[int, str] = {}  # the memory of a gathered parameter -> its name
        self._sharded: dict[int, str] = {}  # the id of a sharded one -> its name
        self._latest = "a parameter", ""  # the sharded one that was read last, and the line that read it
        for unit in units:
            unit.register_forward_hook(torch.compiler.disable(self._return))

    def _return(self, unit: nn.Module, inputs: Any, output: Any) -> Any:
        own = {_memory(parameter) for parameter in unit.parameters() if not isinstance(parameter, DTensor)} - {0}
        _open_containers(unit, output)
        return mapped_tensors(lambda tensor: tensor.clone() if _memory(tensor) in own else tensor, output)

    def first(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Returns itself for the first step of each phase, else a context that does nothing."""
        return (
            self if self._steps.setdefault(micro_batch.phase, micro_batch.step) == micro_batch.step else nullcontext()
        )

    def __enter__(self) -> Any:
        self._sharded = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._handles = [module.register_forward_pre_hook(self._note) for module in self._model.modules()]
        # torch.compile would never compile what it meets first under such a mode.
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _note(self, module: nn.Module, inputs: Any) -> None:
        gathered = [pair for pair in self._model.named_parameters() if not isinstance(pair[1], DTensor)]
        self._gathered |= {_memory(parameter): name for name, parameter in gathered}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        freed = [tensor for tensor in tensors if _is_freed(tensor)]
        if freed and not func.is_view:
            raise self._refusal(self._gathered.get(_memory(freed[0]), "a parameter"), _users_line())
        shards = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        for tensor in shards:
            if id(tensor) in self._sharded:
                self._latest = self._sharded[id(tensor)], _users_line()
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, AssertionError) as error:
            if freed:
                raise self._refusal(self._gathered.get(_memory(freed[0]), "a parameter"), _users_line()) from error
            if shards and len(shards) < len(tensors):  # a shard and a whole tensor do not go together
                raise self._refusal(*self._latest) from error
            raise

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        if error[0] is None and self._new_names():
            raise self._refusal("", "")

    def _new_names(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - self._names

    def _refusal(self, name: str, line: str) -> Refused:
        """Returns the error of a read of a parameter at a line of the job's code."""
        if new := self._new_names():
            return Refused(
                f"the model's forward sets its attribute {min(new)} to a parameter, which FSDP frees after it; "
                "use the parameter itself in forward, or keep parameter.detach().clone()"
            )
        how = "by a derivative of a derivative" if in_backward() else f"outside of the forward of its unit{line}"
        return Refused(f"{name} is read {how}, where FSDP has only a shard of it; {self._remedy}")


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # of a tensor inside of torch.func
        return 0


def _is_freed(tensor: Tensor) -> bool:
    known = not isinstance(tensor, DTensor) and tensor.device.type != "meta" and _memory(tensor)
    return bool(known and tensor.numel() and tensor.untyped_storage().size() == 0)


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _users_line() -> str:
    frame: Any = sys._getframe(1)
    while frame and not is_users_code(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({frame.f_code.co_filename}, line {frame.f_lineno})" if frame else ""


def _open_containers(unit: nn.Module, output: Any) -> None:
    """Lets FSDP find the tensors in what a unit returns: it gathers the parameters again when their gradients come.

    Versions of torch look into what is registered with its pytree, or into dicts, lists, tuples and dataclasses.
    """
    for leaf in tree_leaves(output):
        items = items_of(leaf)
        if items is None:
            continue
        if not (isinstance(leaf, dict | list | tuple) or is_dataclass(leaf)):
            raise Refused(
                f"the model's {type(unit).__name__.removeprefix('FSDP')} returns a {type(leaf).__name__}, in which "
                "FSDP does not look for tensors; return a dict, a tuple or a dataclass"
            )
        register_pytree_node(type(leaf), _opened, _closed)
        _open_containers(unit, [*items.values()])


def _opened(container: Any) -> tuple[list[Any], Any]:
    items = items_of(container) or {}
    return [*items.values()], (container, [*items])


def _closed(values: Any, context: Any) -> Any:
    container, keys = context
    return with_items(container, dict(zip(keys, values)))
