"""What modules without values return: computed once for each kind of call, and remembered.

Before its own stage a rank of a pipeline calls the modules of the stages before, on tensors without values. What they
return has shapes alone, but torch computes these shapes in Python, in some 100 µs an operation, for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
Outputs = dict[tuple[Any, ...], tuple[list[Any], TreeSpec] | None]


class AbsentModules:
    """The outermost modules of a model whose parameters are all absent, and what they have returned.

    A module is computed again where what it returns may depend on values: where it is given a tensor that has some, or
    has one as an attribute; and where it returns anything but absent tensors, or sets or fills an attribute. But for
    `reached`, and the modules that contain it. outputs: what is remembered, by the names of the modules.
    """

    def __init__(self, model: nn.Module, reached: str, outputs: Outputs) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._modules = {names[module]: module for module in _outermost(model, model.get_submodule(reached))}
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
            known = self._outputs.get(key) if key else None
            if known is not None:
                # New tensors: each stands for another one that a stage receives.
                if known[1].is_leaf():
                    return new_absent(known[0][0]) if _is_absent(known[0][0]) else None
                return tree_unflatten([new_absent(leaf) if _is_absent(leaf) else leaf for leaf in known[0]], known[1])
        returned = forward(*args, **kwargs)
        if key and key not in self._outputs:
            with DisableTorchFunction():
                outputs, structure = tree_flatten(returned)
                repeats = all(_is_absent(leaf) or leaf is None for leaf in outputs)
                repeats = repeats and self._attributes(module) == key[1]
                self._outputs[key] = (outputs, structure) if repeats else None
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

    def _attributes(self, module: nn.Module) -> tuple[Any, ...] | None:
        """Returns what the attributes of a module, and of those in it, hold; None where one is a tensor with values."""
        if (known := self._known.get(module)) and known.are_unchanged():
            return known.described
        attributes = self._described(module)
        self._known[module] = Attributes.of(module, attributes)
        return attributes

    def _described(self, module: nn.Module) -> tuple[Any, ...] | None:
        found: list[Any] = []
        for inner in module.modules():
            for name, value in vars(inner).items():
                if name == "forward":  # as remembered() has replaced it
                    continue
                items = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else (value,)
                )
                kinds = [_kind(item) or self._number(item) for item in items]
                if not all(kinds):
                    return None
                found.append((name, *kinds))
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
    in these. held: the objects that these held, alive, so that no other is one of them. described: as the key of a call
    has them."""

    places: Sequence[Collection[Any]]
    held: Sequence[Any]
    described: tuple[Any, ...] | None

    @classmethod
    def of(cls, module: nn.Module, described: tuple[Any, ...] | None) -> Attributes:
        attributes = [vars(inner).values() for inner in module.modules()]
        containers = [value for values in attributes for value in values if isinstance(value, (dict, *CONTAINERS))]
        places = [*attributes, *(c.values() if isinstance(c, dict) else c for c in containers)]
        return cls(places, [*chain.from_iterable(places)], described)

    def are_unchanged(self) -> bool:
        """Returns whether the same objects are there. That a module changes the shape of one in place is not seen."""
        return sum(map(len, self.places)) == len(self.held) and all(
            map(is_, chain.from_iterable(self.places), self.held)
        )


def _outermost(module: nn.Module, reached: nn.Module) -> Iterator[nn.Module]:
    inside = list(module.modules())
    if reached not in inside:
        parameters = [*module.parameters()]
        if parameters and all(parameter.is_meta for parameter in parameters):
            yield module
            return
    elif module is reached:
        return
    for child in module.children():
        yield from _outermost(child, reached)


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """Returns what an argument is like; None where it may be like another and not the same."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype) if leaf.is_meta else None
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def new_absent(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
