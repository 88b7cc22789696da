"""What modules without values return: computed once for each kind of call, and remembered.

Before its own stage a rank of a pipeline calls the modules of the stages before, on tensors without values. What they
return has shapes alone, but torch computes these shapes in Python, in some 100 µs an operation, for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

META = torch.device("meta")
PLAIN = (bool, int, float, str, type(None))
Outputs = dict[tuple[Any, ...], tuple[list[Any], TreeSpec] | None]


class AbsentModules:
    """The outermost modules of a model whose parameters are all absent, and what they have returned.

    A module is computed again where something tells that it does more than return absent tensors: where it returns
    others, or has set or filled an attribute. But for `reached`, and the modules that contain it. outputs: what is
    remembered, by the names of the modules.
    """

    def __init__(self, model: nn.Module, reached: str, outputs: Outputs) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._modules = {names[module]: module for module in _outermost(model, model.get_submodule(reached))}
        self._outputs = outputs

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Lets these modules return what is remembered of a call with such arguments, while the block runs."""
        replaced = {name: module for name, module in self._modules.items() if "forward" not in vars(module)}
        for name, module in replaced.items():
            vars(module)["forward"] = partial(self._call, name, module, module.forward)
        try:
            yield
        finally:
            for module in replaced.values():
                del vars(module)["forward"]

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            key = self._key(name, module, args, kwargs)
            known = self._outputs.get(key) if key else None
            if known is not None:
                # New tensors: each stands for another one that a stage receives.
                return tree_unflatten([_like(leaf) if _is_absent(leaf) else leaf for leaf in known[0]], known[1])
            before = _attributes(module) if key and key not in self._outputs else None
        returned = forward(*args, **kwargs)
        if before is not None and key:
            with DisableTorchFunction():
                outputs, structure = tree_flatten(returned)
                repeats = all(_is_absent(leaf) or isinstance(leaf, PLAIN) for leaf in outputs)
                self._outputs[key] = (outputs, structure) if repeats and _attributes(module) == before else None
        return returned

    def _key(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Returns what a call is like; None where what the module returns may depend on more."""
        leaves, structure = tree_flatten((args, kwargs))
        kinds = [_kind(leaf) for leaf in leaves]
        if not all(kinds):
            return None
        return (name, module.training, torch.is_grad_enabled(), repr(structure), *kinds)


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
        return ("tensor", leaf.is_meta, leaf.shape, leaf.stride(), leaf.dtype)
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _attributes(module: nn.Module) -> list[Any]:
    """Returns what tells whether a module, or one in it, sets or fills an attribute."""
    found: list[Any] = []
    for inner in module.modules():
        for name, value in vars(inner).items():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
            )
            found.append((name, id(value), [id(item) for item in items]))
    return found
