"""What modules without values return is computed once for each kind of call, unless they do more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.parallel.stage_forward import AbsentTensors, leave_absent
from samestep.rank.absent_modules import META, AbsentModules, Outputs


class Inner(nn.Module):
    """Its computations are counted. also: what it does besides."""

    def __init__(self, also: Callable[[Inner, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.also, self.calls = nn.Linear(4, 4), also, [0]
        self.seen: Tensor | None = None
        self.kept: list[Tensor] = []
        self.number = 0

    def forward(self, x: Tensor, factor: Any = 1.0) -> Any:
        COMPUTED.append(id(self))
        more = self.also(self, x)
        y = self.layer(x) * factor
        return y if more is None else (y, more)


COMPUTED: list[int] = []


class Model(nn.Module):
    def __init__(self, also: Callable[[Inner, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = Inner(also), nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Any = 1.0) -> Any:
        return self.first(x, factor)


def absent(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


def times(also: Callable[[Inner, Tensor], Any], inputs: list[tuple[Any, ...]]) -> tuple[int, list[Any]]:
    """How often the first module of a model computes what it is called with, and what it has returned."""
    model = Model(also)
    leave_absent(model, lambda tensor: tensor is model.last.weight or tensor is model.last.bias)
    outputs = Outputs()
    COMPUTED.clear()
    returned = []
    for given in inputs:
        with AbsentTensors("cpu"), AbsentModules(model, outputs, reached=model.last).remembered():
            returned.append(model(*given))
    assert "forward" not in vars(model.first)
    return len(COMPUTED), returned


def nothing(module: Inner, x: Tensor) -> None:
    pass


def test_a_module_without_values_computes_once() -> None:
    count, (first, second) = times(nothing, [(absent(2, 4),), (absent(2, 4),)])
    assert count == 1 and first is not second
    assert first.device == second.device == META and first.shape == second.shape == (2, 4)


@pytest.mark.parametrize(
    ("also", "second"),
    [
        (nothing, (absent(3, 4),)),
        (nothing, (absent(2, 4).double(),)),
        (nothing, (absent(2, 4), 2.0)),
        (nothing, (absent(2, 4), torch.ones(1))),
        (lambda module, x: torch.ones(1), (absent(2, 4),)),
        (lambda module, x: 3, (absent(2, 4),)),
        (lambda module, x: setattr(module, "seen", torch.ones(1)), (absent(2, 4),)),
        (lambda module, x: setattr(module, "seen", x), (absent(3, 4),)),
        (lambda module, x: module.kept.append(x), (absent(2, 4),)),
        (lambda module, x: setattr(module, "number", len(COMPUTED)), (absent(2, 4),)),
    ],
    ids=[
        "other shape",
        "other dtype",
        "other number",
        "given values",
        "returns values",
        "returns a number",
        "holds values",
        "holds another shape",
        "fills",
        "sets",
    ],
)
def test_where_it_may_do_something_else_it_computes_again(
    also: Callable[[Inner, Tensor], Any], second: tuple[Any, ...]
) -> None:
    first = (absent(2, 4), *([torch.ones(1)] if len(second) > 1 and isinstance(second[1], Tensor) else []))
    assert times(also, [first, second])[0] == 2


def test_what_others_set_in_it_tells_calls_apart() -> None:
    model, outputs = Model(nothing), Outputs()
    leave_absent(model, lambda tensor: tensor is model.last.weight or tensor is model.last.bias)
    modules = AbsentModules(model, outputs, reached=model.last)
    COMPUTED.clear()
    for number in (1, 2, 1, 2):
        model.first.number = number
        with AbsentTensors("cpu"), modules.remembered():
            model(absent(2, 4))
    assert len(COMPUTED) == 2


def test_a_module_that_two_others_contain_is_remembered_once() -> None:
    inner = Inner(nothing)
    model = nn.Sequential(*(nn.Sequential(inner, nn.Linear(4, 4)) for _ in range(2)), nn.Linear(4, 4))
    leave_absent(model, lambda tensor: tensor not in {*inner.parameters()})
    COMPUTED.clear()
    with AbsentTensors("cpu"), AbsentModules(model, Outputs(), reached=model[2]).remembered():
        model[:2](absent(2, 4))
    assert [id(inner)] == COMPUTED and "forward" not in vars(inner)


def test_modules_with_values_are_left_alone() -> None:
    model = Model(nothing)
    COMPUTED.clear()
    with AbsentModules(model, Outputs(), reached=model.last).remembered():
        for _ in range(2):
            assert torch.equal(model(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert len(COMPUTED) == 4


class Layered(nn.Module):
    """Two layers, of which it calls one, which is its `last` or one that it does not register."""

    def __init__(self, *, last: int | None = None, hidden: int = 4) -> None:
        super().__init__()
        with META:
            self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 5)])
            self.hidden: tuple[nn.Module, ...] = (nn.Linear(4, hidden),)
        if last is not None:
            self.hidden, self.last = (), self.layers[last]

    def forward(self, x: Tensor) -> Tensor:
        COMPUTED.append(id(self))
        y: Tensor = self.hidden[0](x) if self.hidden else self.last(x)
        return y


@pytest.mark.parametrize(
    ("first", "second", "count", "widths"),
    [
        (Layered(last=0), Layered(last=0), 1, [3, 3]),
        (Layered(last=0), Layered(last=1), 2, [3, 5]),
        (Layered(hidden=4), Layered(hidden=6), 2, [4, 6]),
        (Layered(hidden=4), Layered(hidden=4), 2, [4, 4]),  # whether what is not registered is alike is not looked at
    ],
)
def test_blocks_compute_each_for_itself_unless_they_are_alike(
    first: nn.Module, second: nn.Module, count: int, widths: list[int]
) -> None:
    model = nn.Sequential(first, second, nn.Linear(4, 4))
    COMPUTED.clear()
    with AbsentTensors("cpu"), AbsentModules(model, Outputs(), reached=model[2]).remembered():
        returned = [block(absent(2, 4)) for block in (first, second)]
    assert len(COMPUTED) == count and [tensor.shape[1] for tensor in returned] == widths


def test_blocks_that_are_alike_compute_once_whatever_hooks_they_have() -> None:
    hooked: list[int] = []
    with META:
        model = nn.Sequential(*(Inner(nothing) for _ in range(4)), nn.Linear(4, 4))
    for number in (1, 2):
        model[number].register_forward_pre_hook(lambda *_, number=number: hooked.append(number))
    COMPUTED.clear()
    with AbsentTensors("cpu"), AbsentModules(model, Outputs(), reached=model[4]).remembered():
        model[:4](absent(2, 4))
    assert hooked == [1, 2] and len(COMPUTED) == 1


def test_what_contains_a_cut_is_called_and_the_cut_itself_is_remembered() -> None:
    cut: list[int] = []
    with META:
        blocks = nn.Sequential(*(Inner(nothing) for _ in range(3)))
        model = nn.Sequential(blocks, nn.Linear(4, 4))
    for number in (1, 2):
        blocks[number].register_forward_pre_hook(lambda *_, number=number: cut.append(number))
    COMPUTED.clear()
    outputs = Outputs()
    for _ in range(2):
        with AbsentTensors("cpu"), AbsentModules(model, outputs, cuts=[blocks[1], blocks[2]]).remembered():
            model(absent(2, 4))
    assert cut == [1, 2, 1, 2] and len(COMPUTED) == 1
