"""What modules without values return: computed once for each kind of call, and remembered.

Before its own stage a rank of a pipeline calls the modules of the stages before, on tensors without values. What they
return has shapes alone, but torch computes these shapes in Python, in some 100 µs an operation, for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

META = torch.device("meta")
PLAIN = (bool, int, float, str, type(None))
LEAVES = (Tensor, *PLAIN)  # of which a tuple is as flat as it can be
CONTAINERS = (list, tuple, set, frozenset)
MOST_OBJECTS = 10_000  # where a model sets new ones at each call, nothing is remembered in the end


@dataclass(frozen=True)
class Outputs:
    """What modules have returned: call -> it; None: may depend on more. kinds: what the attributes of a module hold ->
    a number, by which the calls have them: calls are compared often, and attributes are many."""

    of_calls: dict[tuple[Any, ...], tuple[list[Any], TreeSpec] | None] = field(default_factory=dict)
    kinds: dict[tuple[Any, ...], int] = field(default_factory=dict)


class AbsentModules:
    """The outermost modules of a model whose parameters are all absent, and what they have returned.

    A module is computed again where what it returns may depend on values: where it is given a tensor that has some, or
    has one as an attribute; and where it returns anything but absent tensors, or sets or fills an attribute. But for
    `reached`, and the modules that contain it. outputs: what is remembered, by the names of the modules.
    """

    def __init__(self, model: nn.Module, reached: str, outputs: Outputs) -> None:
        names: dict[nn.Module, str] = {}
        for name, module in _outermost(model, model.get_submodule(reached))[1]:
            names.setdefault(module, name)  # one that several others contain has the first of its names
        self._modules = {name: module for module, name in names.items()}
        self._outputs = outputs
        self._forwards = {
            name: partial(self._call, name, module, module.forward)
            for name, module in self._modules.items()
            if "forward" not in vars(module)
        }
        self._objects: dict[int, Any] = {}  # those of attributes: alive, so that no other gets the number of one
        self._known: dict[nn.Module, Attributes] = {}  # of a module that has not changed since

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Lets these modules return what is remembered of a call with such arguments, while the block runs."""
        for name, forward in self._forwards.items():
            vars(self._modules[name])["forward"] = forward
        try:
            yield
        finally:
            for name in self._forwards:
                del vars(self._modules[name])["forward"]

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            key = self._key(name, module, args, kwargs)
            known = self._outputs.of_calls.get(key) if key else None
            if known is not None:
                # New tensors: each stands for another one that a stage receives.
                if known[1].is_leaf():
                    return new_absent(known[0][0]) if _is_absent(known[0][0]) else None
                return tree_unflatten([new_absent(leaf) if _is_absent(leaf) else leaf for leaf in known[0]], known[1])
        returned = forward(*args, **kwargs)
        if key and key not in self._outputs.of_calls:
            with DisableTorchFunction():
                outputs, structure = tree_flatten(returned)
                repeats = all(_is_absent(leaf) or leaf is None for leaf in outputs)
                repeats = repeats and self._attributes(module) == key[1]
                self._outputs.of_calls[key] = (outputs, structure) if repeats else None
        return returned

    def _key(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Returns what a call is like; None where what the module returns may depend on more."""
        leaves: Sequence[Any] = args
        structure = ""
        if kwargs or not all(isinstance(value, LEAVES) for value in args):
            leaves, spec = tree_flatten((args, kwargs))
            structure = repr(spec)
        kinds, attributes = [_kind(leaf) for leaf in leaves], self._attributes(module)
        if attributes is None or not all(kinds):
            return None
        return (name, attributes, torch.is_grad_enabled(), structure, *kinds)

    def _attributes(self, module: nn.Module) -> int | None:
        """Returns the number of what the attributes of a module, and of those in it, hold; None where one is a tensor
        with values."""
        if (known := self._known.get(module)) and known.are_unchanged():
            return known.kind
        described, kinds = self._described(module), self._outputs.kinds
        kind = None if described is None else kinds.setdefault(described, len(kinds))
        self._known[module] = Attributes.of(module, kind)
        return kind

    def _described(self, module: nn.Module) -> tuple[Any, ...] | None:
        found: list[Any] = []
        for inner in module.modules():
            for name, value in vars(inner).items():
                if name == "forward":  # as remembered() has replaced it
                    continue
                found.append(name)
                if isinstance(value, PLAIN):
                    found.append((type(value), value))
                    continue
                if not isinstance(value, (dict, *CONTAINERS)):
                    value = (value,)
                for item in value.values() if isinstance(value, dict) else value:
                    kind = _kind(item) or self._number(item)
                    if not kind:
                        return None
                    found.append(kind)
        return tuple(found)

    def _number(self, item: Any) -> Any:
        """Returns what tells an object from others; None for a tensor with values, and where there are too many."""
        if isinstance(item, Tensor) or len(self._objects) > MOST_OBJECTS:
            return None
        if isinstance(item, nn.Module):
            return type(item)
        self._objects[id(item)] = item
        return id(item)


@dataclass(frozen=True)
class Attributes:
    """The attributes of a module, and of those in it. places: what holds them: the modules' dicts, and the containers
    in these; empty: of these containers, those that held nothing. held: the objects that the others held, alive, so
    that no other is one of them. kind: as the key of a call has them."""

    places: Sequence[Collection[Any]]
    empty: Sequence[Collection[Any]]
    held: Sequence[Any]
    kind: int | None

    @classmethod
    def of(cls, module: nn.Module, kind: int | None) -> Attributes:
        attributes = [vars(inner).values() for inner in module.modules()]
        containers = [value for values in attributes for value in values if isinstance(value, (dict, *CONTAINERS))]
        filled = [container for container in containers if container]
        places = [*attributes, *(c.values() if isinstance(c, dict) else c for c in filled)]
        empty = [container for container in containers if not container]
        return cls(places, empty, [*chain.from_iterable(places)], kind)

    def are_unchanged(self) -> bool:
        """Returns whether the same objects are there. That a module changes the shape of one in place is not seen."""
        return (
            not any(self.empty)
            and sum(map(len, self.places)) == len(self.held)
            and all(map(is_, chain.from_iterable(self.places), self.held))
        )


def _outermost(
    module: nn.Module, reached: nn.Module, name: str = ""
) -> tuple[bool | None, list[tuple[str, nn.Module]]]:
    """Returns whether a module has parameters that are all absent, None where it has none, and False where `reached`
    is in it; and the outermost modules of which this is so, with their names."""
    all_absent = {parameter.is_meta for parameter in module._parameters.values() if parameter is not None}
    found: list[tuple[str, nn.Module]] = []
    for inner_name, inner in module.named_children():
        inner_absent, inner_found = _outermost(inner, reached, f"{name}.{inner_name}" if name else inner_name)
        found += inner_found
        if inner_absent is not None:
            all_absent.add(inner_absent)
    if module is reached:
        return False, []
    if all_absent != {True}:
        return (False if all_absent else None), found
    return True, [(name, module)]


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """Returns what an argument is like; None where it may be like another and not the same."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype) if leaf.is_meta else None
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def new_absent(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
