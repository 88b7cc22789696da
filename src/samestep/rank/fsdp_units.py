"""Finds the units of a model that FSDP shards: modules whose parameters are gathered together."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from samestep.errors import UserError

INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")  # of a module in a list or a dict of modules, in an expression


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
        found = _of_class(model, wrap)
    holders: dict[int, list[nn.Module]] = {}  # of each parameter
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    for reader, parameter in _reads(model):
        holders[id(parameter)].append(reader)
    units: dict[int, nn.Module] = {}  # by id: a module may be the child of several
    for module in found:
        inside = set(module.modules())
        own = [holders[id(parameter)] for parameter in module.parameters()]
        if own and all(inside.issuperset(of) for of in own):
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


def _of_class(model: nn.Module, name: str) -> list[nn.Module]:
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
    through a local name, nor where there is no source: there rank/fsdp_reads.py refuses the first step."""
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
    waiting, seen = ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(cls, name, None)
        method = getattr(method, "fget", None) or getattr(method, "func", method)  # of a property, or a cached one
        if name in seen or not inspect.isfunction(method):
            continue
        seen.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError):
            continue
        myself = next(iter(inspect.signature(method).parameters), "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of, _, path = INDEX.sub(r".\1", ast.unparse(node)).partition(".")
                if of == myself and all(part.isidentifier() or part.isdigit() for part in path.split(".")):
                    found.add(path)
        waiting += [path for path in found if "." not in path]
    return frozenset(found)
