"""A module is copied as deepcopy copies it: the same attributes, shared where they were shared, and nothing of the
original."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.parallel.copied_modules import Unchanged, copied_module


class Shares(nn.Module):
    """What it has stands in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.again = self.first
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.cache: dict[str, Tensor] = {}
        self.first.cache = self.cache  # type: ignore[assignment]
        self.kept = [torch.zeros(2), {"of": self.last}]
        self.sizes, self.scale = (4, 4), 0.5


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.copies = nn.Linear(2, 2), 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        copied = CopiesItself()
        copied.inner, copied.copies = deepcopy(self.inner, memo), self.copies + 1
        return copied


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    model[0].register_forward_hook(print)
    return model


def paths(value: Any, seen: dict[int, int]) -> Any:
    """Describes a value: its types, what tensors hold, and a number for each object, by which sharing is told."""
    if isinstance(value, Tensor):
        return (type(value), seen.setdefault(id(value), len(seen)), value.tolist())
    if isinstance(value, nn.Module):
        number = seen.setdefault(id(value), len(seen))
        return (type(value), number, number == len(seen) - 1 and paths(vars(value), seen))
    if isinstance(value, dict):
        items = [(name, paths(item, seen)) for name, item in value.items()]
        return (type(value), seen.setdefault(id(value), len(seen)), items)
    if isinstance(value, (list, tuple)):
        return (type(value), [paths(item, seen) for item in value])
    return (type(value), value if isinstance(value, (bool, int, float, str)) else None)


@pytest.mark.parametrize("build", [Shares, with_hook, lambda: nn.Sequential(CopiesItself(), nn.Linear(2, 2))])
def test_a_copy_is_as_deepcopy_makes_it(build: Callable[[], nn.Module]) -> None:
    model = build()
    copied = copied_module(model, {})
    assert paths(copied, {}) == paths(deepcopy(model), {})
    assert not {id(inner) for inner in copied.modules()} & {id(inner) for inner in model.modules()}
    assert not {*map(id, copied.parameters())} & {*map(id, model.parameters())}


def test_a_container_that_modules_share_is_shared_by_the_copies() -> None:
    model = Shares()
    copied = copied_module(model, {})
    assert copied.first.cache is copied.cache is not model.cache
    assert copied.last.weight is copied.first.weight and copied.again is copied.first
    assert copied.kept[1]["of"] is copied.last


def test_a_copy_takes_what_the_memo_has() -> None:
    model, absent = nn.Linear(2, 2), nn.Parameter(torch.empty(2, 2, device="meta"))
    assert copied_module(model, {id(model.weight): absent}).weight is absent


class Leaving(nn.Module):
    """Leaves something in itself when `leave` does."""

    def __init__(self, leave: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer, self.norm, self.leave = nn.Linear(2, 2), nn.BatchNorm1d(2), leave
        self.number, self.kept, self.cache = 1000, list[Any](), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.leave(self)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize(
    ("leave", "unchanged"),
    [
        (lambda module: None, True),
        (lambda module: module.layer.register_forward_hook(print).remove(), True),
        (lambda module: setattr(module, "number", module.number + 1), False),
        (lambda module: setattr(module, "seen", None), False),
        (lambda module: module.kept.append(1), False),
        (lambda module: module.cache.update(a=1), False),
        (lambda module: module.norm(torch.ones(2, 2)), False),
        (lambda module: module.layer.weight.data.mul_(2), True),  # as no forward pass should
        (lambda module: setattr(module.layer, "scale", 2), False),
    ],
)
def test_what_a_call_leaves_in_a_module_is_told(leave: Callable[[Any], object], unchanged: bool) -> None:
    module = Leaving(leave)
    at_first = Unchanged(module)
    module(torch.ones(1, 2))
    assert at_first.is_so() == unchanged


@pytest.mark.parametrize("kept", [object(), [1], (nn.Linear(1, 1),)])
def test_of_objects_that_may_change_unseen_nothing_is_told(kept: Any) -> None:
    module = Leaving(lambda module: None)
    module.kept.append(kept)
    assert not Unchanged(module).is_so()
