"""FSDP's units, whose parameters are gathered together, and reads of their parameters outside of their forward."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node, tree_leaves

from samestep.errors import Refused, UserError
from samestep.job import MicroBatch
from samestep.job.walk import items_of, mapped_tensors, with_items
from samestep.message import Message, message
from samestep.world.imports import is_users_code

INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")  # the index of a module in a list or a dict of modules, in an expression


def units_of(model: nn.Module, wrap: str) -> list[nn.Module]:
    """Returns the modules to shard, inner ones first, without the model itself, which holds what they leave.

    wrap: 'auto', the repeated blocks (modules of one class in a list), or the children where no class is repeated;
    'children', the model's children; 'root', none; or the name of a class, each module of it.
    A module is left out that shares a parameter with a module outside of it (tied weights), or has one that the forward
    of a module outside of it reads: there the parameter would not be gathered. Raises UserError for an unknown class.
    """
    if wrap == "root":
        return []
    if wrap == "auto":
        found = list(_blocks(model)) or list(_children(model))
    elif wrap == "children":
        found = list(_children(model))
    else:
        found = _modules_of_class(model, wrap)
    holders: dict[int, list[nn.Module]] = {}  # of each parameter
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    for reader, parameter in _reads(model):
        holders[id(parameter)].append(reader)
    units: dict[int, nn.Module] = {}  # by id: a module may be the child of several
    for module in found:
        inside = set(module.modules())
        parameter_holders = [holders[id(parameter)] for parameter in module.parameters()]
        if parameter_holders and all(inside.issuperset(modules) for modules in parameter_holders):
            units[id(module)] = module
    return [module for module in reversed([*model.modules()]) if id(module) in units]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module's children that are called: in the place of a list of modules, its items."""
    for child in module.children():
        if _is_called(child):
            yield child
        else:
            yield from _children(child)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that stand with another of their class in a list: a Sequential, a ModuleList, or a
    ModuleDict of one class."""
    children = list(module.children())
    count = Counter(type(child) for child in children)
    is_list = isinstance(module, nn.Sequential | nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len(count) < 2
    )
    for child in children:
        if is_list and count[type(child)] > 1 and _is_called(child):
            yield child
        else:
            yield from _blocks(child)


def _is_called(module: nn.Module) -> bool:
    """Returns whether a module has a forward, which lists of modules and of parameters have not."""
    return type(module).forward is not nn.Module.forward


def _modules_of_class(model: nn.Module, name: str) -> list[nn.Module]:
    inner = [module for module in model.modules() if module is not model and _is_called(module)]
    found = [module for module in inner if type(module).__name__ == name]
    if not found:
        classes = {type(module).__name__ for module in inner if any(True for _ in module.parameters())}
        raise UserError(
            f"--set-engine fsdp.wrap={name}: the model has no module of this class; name one of "
            f"{', '.join(sorted(classes)) or 'none'}, or give auto, children or root"
        )
    return found


def _reads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yields (module, parameter) where a module's forward reads a parameter of another module, as in
    F.linear(x, self.wte.weight). Found in the source of forward and of the methods and properties that it names; not
    through a local name, nor where there is no source: there rank/fsdp_units.py refuses the first step."""
    for module in model.modules():
        cls: Any = type(module)  # which mypy does not take for hashable
        for path in _paths(cls):
            yield from ((module, parameter) for parameter in _parameters_at(module, path.split(".")))


def _parameters_at(value: Any, path: list[str]) -> list[nn.Parameter]:
    """Returns the parameters that an attribute is made of. Runs no code of the model's: a parametrization may move its
    buffers when it is read, as spectral_norm does."""
    if isinstance(value, nn.Parameter) or not path:
        return [value] if isinstance(value, nn.Parameter) else []
    held = {**vars(value), **value._parameters, **value._modules} if isinstance(value, nn.Module) else {}
    parametrized = held.get("parametrizations", {})
    if path[0] in parametrized:
        return list(parametrized[path[0]].parameters())
    return _parameters_at(held.get(path[0]), path[1:])


@cache
def _paths(cls: Any) -> frozenset[str]:
    """Returns what the forward of a class of modules reads of self: {'wte.weight', 'wte', …}."""
    found: set[str] = set()
    waiting, read = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(cls, name, None)
        # The function of a property, or of a cached one.
        method = getattr(method, "fget", None) or getattr(method, "func", method)
        if name in read or not inspect.isfunction(method):
            continue
        read.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError):
            continue
        myself = next(iter(inspect.signature(method).parameters), "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                base, _, path = INDEX.sub(r".\1", ast.unparse(node)).partition(".")
                if base == myself and all(part.isidentifier() or part.isdigit() for part in path.split(".")):
                    found.add(path)
        waiting += [path for path in found if "." not in path]
    return frozenset(found)


class FSDPReads(TorchDispatchMode):
    """Lets a unit return its parameters; as a context, refuses other reads of them outside of its forward.

    A unit that returns a parameter, or a view of it, returns a copy, because the original is freed. As a context it
    looks at each operation, which takes time: use it for a first step. Make it before the units are sharded: its hooks
    must come before FSDP's. units: the modules that are sharded, the model among them. remedy: what helps against such
    a read.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], remedy: Message) -> None:
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
        memories = {_memory(parameter) for parameter in unit.parameters() if not isinstance(parameter, DTensor)} - {0}
        _open_containers(unit, output)
        return mapped_tensors(lambda tensor: tensor.clone() if _memory(tensor) in memories else tensor, output)

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
            return Refused(message("forward_keeps_a_parameter_that_fsdp_frees", attribute=min(new)))
        if in_backward():
            return Refused(message("second_derivative_reads_a_shard", parameter=name, remedy=self._remedy))
        return Refused(message("shard_read_outside_of_its_unit", parameter=name, line=line, remedy=self._remedy))


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
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _open_containers(unit: nn.Module, output: Any) -> None:
    """Lets FSDP find the tensors in what a unit returns: it gathers the parameters again when their gradients come.

    Versions of torch look into what is registered with its pytree, or into dicts, lists, tuples and dataclasses.
    """
    for leaf in tree_leaves(output):
        items = items_of(leaf)
        if items is None:
            continue
        if not (isinstance(leaf, dict | list | tuple) or is_dataclass(leaf)):
            names = {"module": type(unit).__name__.removeprefix("FSDP"), "container": type(leaf).__name__}
            raise Refused(message("fsdp_does_not_look_into_what_a_module_returns", **names))
        register_pytree_node(type(leaf), _opened, _closed)
        _open_containers(unit, [*items.values()])


def _opened(container: Any) -> tuple[list[Any], Any]:
    items = items_of(container) or {}
    return [*items.values()], (container, [*items])


def _closed(values: Any, context: Any) -> Any:
    container, keys = context
    return with_items(container, dict(zip(keys, values)))
