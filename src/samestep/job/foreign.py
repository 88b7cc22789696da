"""Looks at what a script has made, and runs none of its code: objects may answer whatever they like when they are
compared, hashed, counted, shown, or asked for an attribute or their class, and may answer it once.

Objects are known by their identity, their classes by `type`, and their attributes by what the instance and the class
hold. What can only be asked of the object, such as how many rows a dataset has, goes through `answer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from builtins import isinstance as is_a
else:

    def is_a(thing: object, kinds: Any) -> bool:
        """Whether an object is of a class, whatever its __class__ says."""
        return issubclass(type(thing), kinds)


__all__ = [
    "ById",
    "answer",
    "attribute_of",
    "attributes_of",
    "defines",
    "is_a",
    "named_buffers_in",
    "named_parameters_in",
    "named_parts_in",
    "parameters_in",
    "parts_in",
]

T = TypeVar("T")
V = TypeVar("V")
REGISTRIES = "_parameters", "_buffers", "_modules"  # of a module, which look like attributes
IN_C = GetSetDescriptorType, MemberDescriptorType


def attributes_of(thing: object) -> dict[str, Any]:
    """Returns the attributes of an instance itself; none where it has no dictionary."""
    try:
        values = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return values if type(values) is dict else {}


def attribute_of(thing: object, name: str, default: Any = None) -> Any:
    """Returns an attribute that an instance or its class holds; `default` where only a call would tell."""
    values = attributes_of(thing)
    if name in values:
        return values[name]
    for registry in REGISTRIES:
        parts = values.get(registry)
        if is_a(parts, dict) and name in parts:
            return parts[name]
    for kind in type.__getattribute__(type(thing), "__mro__"):
        if name in (held := type.__getattribute__(kind, "__dict__")):
            return _class_attribute(thing, held[name], default)
    return default


def _class_attribute(thing: object, value: Any, default: Any) -> Any:
    """Returns what a class holds for its instances. A property or a method would run code."""
    if type(value) in IN_C:
        try:
            return value.__get__(thing, type(thing))
        except AttributeError:
            return default
    return default if hasattr(type(value), "__get__") else value


def defines(thing: object, name: str) -> bool:
    """Whether an instance or its class holds an attribute or a method."""
    kinds = type.__getattribute__(type(thing), "__mro__")
    return name in attributes_of(thing) or any(name in type.__getattribute__(kind, "__dict__") for kind in kinds)


def answer(ask: Callable[[], T], default: T) -> T:
    """Returns what an object answers to a question that the script asks it, too; `default` where it raises."""
    try:
        return ask()
    except Exception:
        return default


class ById(Generic[V]):
    """Values of objects, by their identity. It keeps no object alive; one without weak references has no value."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def put(self, thing: object, value: V) -> None:
        """Gives an object a value, unless it has one."""
        if thing in self:
            return
        number, entries = id(thing), self._entries

        def forget(reference: object) -> None:
            if number in entries and entries[number][0] is reference:
                del entries[number]

        try:
            entries[number] = weakref.ref(thing, forget), value
        except TypeError:
            return

    def get(self, thing: object, default: V) -> V:
        return self._entries[id(thing)][1] if thing in self else default

    def __contains__(self, thing: object) -> bool:
        entry = self._entries.get(id(thing))
        return entry is not None and entry[0]() is thing

    def __iter__(self) -> Iterator[Any]:
        """Yields the objects that are alive."""
        living = [reference() for reference, _ in [*self._entries.values()]]
        yield from (thing for thing in living if thing is not None)

    def clear(self) -> None:
        self._entries.clear()


def named_parts_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each part of a module, as of named_modules(), and the part; the module itself first."""
    known, waiting = set[int](), [("", module)]
    while waiting:
        name, part = waiting.pop()
        if id(part) not in known:
            known.add(id(part))
            yield name, part
            inner = [(f"{name}.{key}" if name else key, child) for key, child in _items(part, "_modules")]
            waiting += reversed(inner)


def parts_in(module: Any) -> Iterator[Any]:
    """Yields the parts of a module, as of modules()."""
    yield from (part for _, part in named_parts_in(module))


def named_parameters_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each parameter of a module, and the parameter; one that is tied once."""
    return _named_tensors(module, "_parameters")


def named_buffers_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name of each buffer of a module, and the buffer."""
    return _named_tensors(module, "_buffers")


def parameters_in(module: Any) -> Iterator[Any]:
    """Yields the parameters of a module."""
    yield from (parameter for _, parameter in named_parameters_in(module))


def _named_tensors(module: Any, registry: str) -> Iterator[tuple[str, Any]]:
    known = set[int]()
    for name, part in named_parts_in(module):
        for key, tensor in _items(part, registry):
            if id(tensor) not in known:
                known.add(id(tensor))
                yield f"{name}.{key}" if name else key, tensor


def _items(part: Any, registry: str) -> list[tuple[str, Any]]:
    """Returns what a registry of a module holds. One whose constructor has not run has none."""
    values = attributes_of(part).get(registry)
    return [] if values is None else [(key, value) for key, value in values.items() if value is not None]
