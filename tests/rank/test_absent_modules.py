"""What modules without values return is computed once for each kind of call, unless they do more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.rank.absent_modules import META, AbsentModules, Outputs
from samestep.rank.stage_forward import AbsentTensors, leave_absent


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
        with AbsentTensors("cpu"), AbsentModules(model, "last", outputs).remembered():
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
    modules = AbsentModules(model, "last", outputs)
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
    with AbsentTensors("cpu"), AbsentModules(model, "2", Outputs()).remembered():
        model[:2](absent(2, 4))
    assert [id(inner)] == COMPUTED and "forward" not in vars(inner)


def test_modules_with_values_are_left_alone() -> None:
    model = Model(nothing)
    COMPUTED.clear()
    with AbsentModules(model, "last", Outputs()).remembered():
        for _ in range(2):
            assert torch.equal(model(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert len(COMPUTED) == 4
