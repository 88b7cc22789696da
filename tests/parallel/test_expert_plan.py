"""Which modules are experts: what is found in a model, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.errors import UserError
from samestep.parallel.expert_plan import expert_plan

ROUTED: list[Tensor] = []  # what a router leaves behind


class Router(nn.Module):
    """Four experts, called by `go`, between two other layers."""

    def __init__(self, go: Callable[[Any, Tensor], Tensor], expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(6, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(expert() for _ in range(4))
        self.last, self.go = nn.Linear(8, 3), go

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.go(self, self.first(x)))  # type: ignore[no-any-return]


def top_two(model: Any, x: Tensor) -> Tensor:
    weights, chosen = model.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, place = torch.where(chosen == number)
        if len(row):
            out = out.index_add(0, row, weights[row, place, None] * expert(x[row]))
    return out


def all_experts(model: Any, x: Tensor) -> Tensor:
    shares = model.gate(x).softmax(-1)
    return sum(shares[:, n, None] * expert(x) for n, expert in enumerate(model.experts))  # type: ignore[return-value]


def with_capacity(model: Any, x: Tensor) -> Tensor:
    """At most two rows for each expert; the best ones of a column."""
    shares = model.gate(x).softmax(-1)
    out = x.clone()
    for number, expert in enumerate(model.experts):
        best = shares[:, number].topk(min(2, len(x))).indices
        out = out.index_add(0, best, shares[best, number, None] * expert(x[best]))
    return out


def one_after_the_other(model: Any, x: Tensor) -> Tensor:
    for expert in model.experts:
        x = x + expert(x).relu()
    return x


def over_the_rows(model: Any, x: Tensor) -> Tensor:
    return all_experts(model, x - x.mean(0))


def leaving_behind(model: Any, x: Tensor) -> Tensor:
    ROUTED.append(model.gate(x).softmax(-1).mean())
    out = all_experts(model, x) * sum(ROUTED)
    if len(ROUTED) > 1:
        ROUTED.clear()
    return out


def with_a_penalty(model: Any, x: Tensor) -> Tensor:
    return top_two(model, x) + sum(parameter.square().sum() for parameter in model.experts.parameters())


def changed_in_place(model: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for share, expert in zip(model.gate(x).softmax(-1).T, model.experts):
        computed = expert(x)
        computed *= share[:, None]
        out += computed
    return out


def counted(model: Any, x: Tensor) -> Tensor:
    """An attribute and a buffer that are assigned, and a list that grows."""
    model.calls = getattr(model, "calls", 0) + 1
    model.history = [*getattr(model, "history", ()), x.detach().mean()]
    return all_experts(model, x) * 0.5**model.calls


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False))


def job(go: Callable[[Any, Tensor], Tensor], expert: Callable[[], nn.Module] = linear) -> Job:
    generator = torch.Generator().manual_seed(0)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Router(go, expert)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)),
        global_batch=8,
        epochs=1,
    )


@pytest.mark.parametrize("go", [top_two, all_experts, with_capacity, over_the_rows, changed_in_place, counted])
def test_experts_are_found_whatever_the_routers_code_is(go: Callable[[Any, Tensor], Tensor]) -> None:
    (experts,) = expert_plan(job(go), 2).lists
    assert (experts.router, len(experts.names), experts.widths) == ("", 4, (8, 8))
    assert [experts.owner(name, 2) for name in experts.names] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("go", "expert", "ranks", "said"),
    [
        (one_after_the_other, linear, 2, "model_without_experts"),
        (all_experts, normalised, 2, "model_without_experts"),
        (top_two, linear, 3, "experts_do_not_divide"),
        (top_two, lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 2, "random_numbers_inside_of_experts"),
        (top_two, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval()), 2, "model_without_experts"),
        (top_two, lambda: nn.utils.weight_norm(nn.Linear(8, 8)), 2, "experts_with_hooks"),
        (with_a_penalty, linear, 2, "experts_read_outside"),
        (leaving_behind, linear, 2, "router_is_not_computed_twice"),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(
    go: Callable[[Any, Tensor], Tensor], expert: Callable[[], nn.Module], ranks: int, said: str
) -> None:
    ROUTED.clear()
    with pytest.raises(UserError) as refused:
        expert_plan(job(go, expert), ranks)
    assert refused.value.message.id == said


@pytest.mark.parametrize(("go", "said"), [(top_two, None), (leaving_behind, "router_is_not_computed_twice")])
def test_rows_that_a_forward_pass_changes_are_new_in_each_trial(
    go: Callable[[Any, Tensor], Tensor], said: str | None
) -> None:
    ROUTED.clear()
    changing = replace(job(go), forward=lambda model, batch: model(batch.inputs.mul_(2)))
    if said is None:
        assert len(expert_plan(changing, 2).lists) == 1
        return
    with pytest.raises(UserError) as refused:
        expert_plan(changing, 2)
    assert refused.value.message.id == said


def test_tied_experts_are_refused() -> None:
    tied = nn.Linear(8, 8)
    with pytest.raises(UserError) as refused:
        expert_plan(job(top_two, lambda: nn.Sequential(tied)), 2)
    assert refused.value.message.id == "experts_share_weights"
