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
LEAVES = (Tensor, *PLAIN)  # types of which a tuple is flat
CONTAINERS = (list, tuple, set, frozenset)
# Attributes of a module that its call reads, and its forward does not: the forward as remembered() has replaced it,
# and hooks, which run around it.
OF_CALLS = {"forward", *(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))}
MOST_OBJECTS = 10_000  # where a model sets new ones at each call, nothing is remembered in the end


@dataclass(frozen=True)
class Outputs:
    """What modules have returned: call -> it; None: may depend on more. kinds: the class of a module and what its
    attributes hold -> a number, by which the calls have them: calls are compared often, and attributes are many. So a
    model's blocks, which are alike, are computed once. objects: those of attributes, alive, so that no other gets the
    number of one."""

    of_calls: dict[tuple[Any, ...], tuple[list[Any], TreeSpec] | None] = field(default_factory=dict)
    kinds: dict[tuple[Any, ...], int] = field(default_factory=dict)
    objects: list[dict[int, Any]] = field(default_factory=list)


class AbsentModules:
    """The outermost modules of a model whose parameters are all absent, and what they have returned.

    A module is computed again where what it returns may depend on values: where it is given a tensor that has some, or
    has one as an attribute; and where it returns anything but absent tensors, or sets or fills an attribute. But for
    `reached`, and the modules that contain it or one of `cuts`. outputs: what is remembered.
    """

    def __init__(
        self, model: nn.Module, outputs: Outputs, *, reached: nn.Module | None = None, cuts: Collection[nn.Module] = ()
    ) -> None:
        self._outputs = outputs
        self._forwards = {
            module: partial(self._call, module, module.forward)
            for module in _outermost(model, reached, cuts)[1]
            if "forward" not in vars(module)
        }
        self._objects: dict[int, Any] = {}
        outputs.objects.append(self._objects)
        self._known: dict[nn.Module, Attributes] = {}  # of a module that has not changed since

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Lets these modules return what is remembered of a call with such arguments, while the block runs."""
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module in self._forwards:
                del vars(module)["forward"]

    def _call(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            key = self._key(module, args, kwargs)
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
                repeats = repeats and self._attributes(module) == key[0]
                self._outputs.of_calls[key] = (outputs, structure) if repeats else None
        return returned

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Returns a key of a call; None where the module's result may depend on more."""
        leaves: Sequence[Any] = args
        structure = ""
        if kwargs or not all(isinstance(value, LEAVES) for value in args):
            leaves, spec = tree_flatten((args, kwargs))
            structure = repr(spec)
        kinds, attributes = [_kind(leaf) for leaf in leaves], self._attributes(module)
        if attributes is None or not all(kinds):
            return None
        return (attributes, torch.is_grad_enabled(), structure, *kinds)

    def _attributes(self, module: nn.Module) -> int | None:
        """Returns the number of a module's class and of what its attributes, and those of the modules in it, hold; None
        where one is a tensor with values."""
        if (known := self._known.get(module)) and known.are_unchanged():
            return known.kind
        described, kinds = self._described(module), self._outputs.kinds
        kind = None if described is None else kinds.setdefault(described, len(kinds))
        self._known[module] = Attributes.of(module, kind)
        return kind

    def _described(self, module: nn.Module) -> tuple[Any, ...] | None:
        inside = {id(inner): number for number, inner in enumerate(module.modules())}
        found: list[Any] = []
        for inner in module.modules():
            found.append(type(inner))
            for name, value in vars(inner).items():
                if inner is module and name in OF_CALLS:
                    continue
                found.append(name)
                if isinstance(value, PLAIN):
                    found.append((type(value), value))
                    continue
                if not isinstance(value, (dict, *CONTAINERS)):
                    value = (value,)
                for item in (*value, *value.values()) if isinstance(value, dict) else value:
                    # A module stands for its place; its attributes are looked at in turn.
                    kind = inside.get(id(item)) if isinstance(item, nn.Module) else _kind(item)
                    if kind is None and (kind := self._number(item)) is None:
                        return None
                    found.append(kind)
        return tuple(found)

    def _number(self, item: Any) -> Any:
        """Returns what tells an object from others; None for a tensor with values, and where there are too many."""
        if isinstance(item, Tensor) or len(self._objects) > MOST_OBJECTS:
            return None
        self._objects[id(item)] = item
        return (id(item),)


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
    module: nn.Module, reached: nn.Module | None, cuts: Collection[nn.Module]
) -> tuple[bool | None, list[nn.Module]]:
    """Returns whether a module has parameters that are all absent, None where it has none, and False where `reached`
    or one of `cuts` is in it; and the outermost modules of which this is so."""
    all_absent = {parameter.is_meta for parameter in module._parameters.values() if parameter is not None}
    found: list[nn.Module] = []
    for inner in module.children():
        inner_absent, inner_found = _outermost(inner, reached, cuts)
        found += inner_found
        if inner_absent is not None:
            all_absent.add(inner_absent)
    if module is reached:
        return False, []
    if all_absent != {True}:
        return (False if all_absent else None), found
    return module not in cuts, [module]


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """Returns what an argument is like; None where it may be like another and not the same."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype) if leaf.is_meta else None
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def new_absent(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
