"""Walks nested data, and models that torch.compile has compiled.

Nested are tuples, lists, dicts, what is registered with torch's pytree, and what that takes for one leaf: other
mappings, such as Hugging Face's BatchEncoding, dataclasses, and subclasses of tuple, list and dict.

Ranks walk the same data in the same order. A mapping's keys may come in another one in each process, where they were in
a set: its items are walked in the order of their keys' texts.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from samestep.job.foreign import answer, attribute_of, attributes_of, is_a

if TYPE_CHECKING:
    from torch import nn

DEEPEST = 4  # how deep objects are looked for that hold tensors
NO_BATCHES = ("torch", "builtins", "types", "functools", "samestep")  # packages whose objects are no batches
DICTS = (dict, OrderedDict, defaultdict)  # whose items torch's pytree takes as they come


def flattened(data: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the leaves of nested data, and a function that makes data of the same types from as many others."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    nodes, tree = tree_flatten(data, is_leaf=lambda node: type(node) in DICTS)
    inner = [_flattened_node(node) for node in nodes]

    def rebuilt(leaves: Iterable[Any]) -> Any:
        waiting = iter(leaves)
        return tree_unflatten([rebuild([*islice(waiting, len(found))]) for found, rebuild in inner], tree)

    return [leaf for found, _ in inner for leaf in found], rebuilt


def leaves_of(data: Any) -> list[Any]:
    """Returns the leaves of nested data: tensors, numbers, texts, and objects that are no containers."""
    return flattened(data)[0]


def outline(data: Any) -> str:
    """Returns the types and keys of nested data, without its leaves: the same text for the same form on every rank."""
    items = items_of(data)
    if items is None:
        return "*"
    return f"{type(data).__name__}({', '.join(f'{key!r}: {outline(item)}' for key, item in items.items())})"


def text_of(leaf: Any) -> str:
    """Returns the text of a value that is no tensor, the same in every process: sets in order, and no addresses."""
    if isinstance(leaf, set | frozenset):
        return f"{type(leaf).__name__}{sorted(map(text_of, leaf))}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(leaf))


def known_leaves(data: Any, depth: int = DEEPEST) -> list[Any]:
    """Returns the leaves of what is observed, also of objects that hold tensors; none of data with a container of its
    own that does not tell them."""
    found: list[Any] = []
    for leaf in answer(lambda: leaves_of(data), list[Any]()):
        held = held_by_object(leaf, depth)
        found += [leaf] if held is None else known_leaves([*held.values()], depth - 1)
    return found


def held_by_object(value: Any, depth: int = DEEPEST) -> dict[str, Any] | None:
    """Returns the attributes of an object that holds tensors and is no container, module or tensor itself, as a batch
    of the script's own class; None of any other value."""
    from torch import Tensor, nn

    held = attributes_of(value)
    module = str(getattr(type(value), "__module__", ""))
    if not held or depth <= 0 or is_a(value, Tensor | nn.Module | type) or module.partition(".")[0] in NO_BATCHES:
        return None
    return held if any(is_a(leaf, Tensor) for leaf in known_leaves([*held.values()], depth - 1)) else None


def mapped(change: Callable[..., Any], data: Any, *more: Any) -> Any:
    """Returns nested data like `data`, whose leaves are change(leaf, *leaves of `others` in its place)."""
    leaves, rebuilt = flattened(data)
    return rebuilt(change(*values) for values in zip(leaves, *map(leaves_of, more), strict=True))


def mapped_tensors(change: Callable[[Any], Any], data: Any) -> Any:
    """Returns nested data with `change` applied to its tensors."""
    from torch import Tensor

    return mapped(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, data)


def without_graph(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what `call` returns for the arguments, with tensors that have no graph.

    It is called under torch.no_grad(), and again with gradients where it computes a derivative itself, as a model of
    forces does.
    """
    import torch

    try:
        with torch.no_grad():
            return call(*arguments)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return mapped_tensors(torch.Tensor.detach, call(*arguments))


def items_of(value: Any) -> dict[Any, Any] | None:
    """Returns what a container holds, by its keys in the order of their texts, or by its fields or places; None of a
    value that is no container."""
    if _is_mapping(value):
        keys = list(value.keys())  # not all iterate over their keys
        # Names without their texts: torch.compile follows no regular expression.
        named = all(isinstance(key, str) for key in keys)
        return {key: value[key] for key in (sorted(keys) if named else sorted(keys, key=text_of))}
    if is_dataclass(type(value)):
        return {field.name: attribute_of(value, field.name) for field in fields(type(value))}
    return dict(enumerate(value)) if is_a(value, list | tuple) else None


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Returns a container of the same type that holds `items` instead."""
    if isinstance(value, list | tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    if not _is_mapping(value):
        return with_attributes(value, items)
    if type(value) is dict:  # which torch.compile follows, as it does no copy.copy()
        return {key: items[key] for key in value}
    try:
        changed = copy.copy(value)
        for name, item in items.items():
            changed[name] = item
    except TypeError:  # of a mapping that cannot be copied, or changed
        return type(value)(items)
    return changed


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """Returns a copy of an object with other attributes, also of a frozen dataclass."""
    changed = copy.copy(value)
    for name, attribute in attributes.items():
        object.__setattr__(changed, name, attribute)
    return changed


def _is_mapping(value: Any) -> bool:
    """Returns whether a value has keys and their items; torch_geometric's Data is no Mapping, and does."""
    return callable(getattr(type(value), "keys", None)) and hasattr(type(value), "__getitem__")


def _flattened_node(node: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    items = items_of(node)
    if items is None:
        return [node], lambda leaves: leaves[0]
    found, rebuilt = flattened([*items.values()])
    return found, lambda leaves: with_items(node, dict(zip(items, rebuilt(leaves))))


def without_wrappers(model: nn.Module) -> nn.Module:
    """Takes off the modules that torch.compile puts around a model and its parts: `_orig_mod.` is in no name.

    What they hold stays compiled, as by nn.Module.compile, and has their hooks.
    """
    model = _inside(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _inside(child)
    return model


def _inside(module: nn.Module) -> nn.Module:
    """Returns the module inside of one of torch.compile's, compiled by itself; any other module as it is."""
    inner = module._modules.get("_orig_mod")
    if inner is None or not hasattr(module, "dynamo_ctx"):
        return module
    compiler: Any = module.dynamo_ctx
    inner._compiled_call_impl = compiler(_frame(inner))
    for name, hooks in vars(module).items():
        if "_hooks" in name and isinstance(hooks, dict):
            vars(inner)[name].update(hooks)
    return inner


def _frame(module: nn.Module) -> Any:
    """Returns the call of a module that torch.compile is given. Where its forward is torch's own, that needs a frame
    around it: torch.compile enters no frame of torch's."""
    call: Any = module._call_impl
    return (lambda *inputs, **named: call(*inputs, **named)) if type(module).__module__.startswith("torch.") else call


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns a model without wrappers that nothing compiles when it is called."""
    model = without_wrappers(model)
    for module in model.modules():
        module._compiled_call_impl = None
    return model
