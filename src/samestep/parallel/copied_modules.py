"""Copies a module as copy.deepcopy does, in less time; and tells whether a copy is as it was.

Of a module of torch's, deepcopy spends most on what is nearly always empty or a plain value: a dozen dicts of hooks. A
trial of a pipeline needs a copy of its model for each stage that leaves something in it: 64 times 64 blocks.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from copy import deepcopy
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)
PLAIN: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None), type))
CONTAINERS = frozenset((dict, OrderedDict, list, set))
# Attributes of these classes are replaced, not changed. A copy has the same functions.
FIXED: tuple[type, ...] = (*PLAIN, FunctionType, BuiltinFunctionType, torch.dtype, torch.device, torch.Size)
USUAL = {name: getattr(nn.Module, name) for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")}
COPIES_ITSELF = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__slots__")


def copied_module(module: AnyModule, memo: dict[int, Any]) -> AnyModule:
    """Returns deepcopy(module, memo). A class that says how its modules are copied is asked, as deepcopy does."""
    of_class: dict[type, bool] = {}
    inside = [
        inner for inner in module.modules() if of_class.setdefault(type(inner), _is_copied_as_object(type(inner)))
    ]
    for inner in inside:
        memo[id(inner)] = object.__new__(inner.__class__)
    for inner in reversed(inside):  # what a module copies by itself may look into the copies of the modules in it
        state = inner.__getstate__().items()
        memo[id(inner)].__setstate__({n: value if type(value) in PLAIN else _copied(value, memo) for n, value in state})
    return deepcopy(module, memo)


def _is_copied_as_object(kind: type[nn.Module]) -> bool:
    """Returns whether deepcopy makes a module of this class of copies of its attributes, and of nothing else."""
    return (
        all(getattr(kind, name) is usual for name, usual in USUAL.items())
        and kind.__new__ is object.__new__
        and not any(hasattr(kind, name) for name in COPIES_ITSELF)
        and kind not in copyreg.dispatch_table
    )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind not in CONTAINERS or (value and kind is not dict):
        return deepcopy(value, memo)
    if (known := memo.get(id(value))) is not None:
        return known
    memo[id(value)] = copied = kind()
    for name, item in value.items() if value else ():
        copied[deepcopy(name, memo)] = _copied(item, memo)
    return copied


class Unchanged:
    """A module as it is now, of which is_so() tells whether something was left in it since."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._contents = module, _contents(module)

    def is_so(self) -> bool:
        """Returns whether the module holds the same objects, and no tensor was changed in place; False for a module
        with objects that may change unseen."""
        before, now = self._contents, _contents(self._module)
        return before is not None and now is not None and len(before) == len(now) and all(map(is_, before, now))


def _contents(module: nn.Module) -> list[Any] | None:
    """Returns what the attributes of a module and of those in it hold, and how often each tensor was changed; None for
    objects in which this would not show."""
    inside = {id(inner) for inner in module.modules()}
    found: list[Any] = []
    for inner in module.modules():
        for name, value in vars(inner).items():
            found += (name, value)
            if not isinstance(value, (dict, list, tuple, set, frozenset)):
                value = (value,)
            for item in chain(value, value.values()) if isinstance(value, dict) else value:
                found.append(item)
                if isinstance(item, Tensor):
                    found.append(item._version)
                elif not (isinstance(item, FIXED) or id(item) in inside):
                    return None
    return found
