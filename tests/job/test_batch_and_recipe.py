"""What both sides of a proof share of a job is torch's: optimizers and their groups, the halves of a batch, phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep import Batch, Phase, Recipe
from samestep.job import MicroBatch, output_and_state
from samestep.job.phases import in_turn

SETTINGS: dict[Any, dict[str, Any]] = {
    torch.optim.AdamW: {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    torch.optim.RMSprop: {"lr": 0.02, "alpha": 0.5, "momentum": 0.4, "centered": True},
}
PLACE = MicroBatch(0, 0, 0, np.arange(2), 2, 2.0, 1.0, completes_step=True, completes_epoch=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)})


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.5},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def _loss(model: Any, step: int) -> Tensor:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    return model["second"](torch.tanh(model["first"](rows))).square().mean()  # type: ignore[no-any-return]


def _trained(model: nn.Module, build: Callable[[nn.Module], Any]) -> list[Tensor]:
    optimizer = build(model)
    for step in range(4):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("groups", [None, _groups])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_recipe_builds_torchs_optimizer(kind: Any, groups: Any) -> None:
    recipe = Recipe(kind, SETTINGS[kind], groups)
    ours = _trained(_model(), recipe.build)
    torchs = _trained(_model(), lambda m: kind(groups(m) if groups else m.parameters(), **SETTINGS[kind]))
    assert all(map(torch.equal, ours, torchs))
    plain = _trained(_model(), lambda m: kind(m.parameters(), lr=SETTINGS[kind]["lr"]))
    assert not all(map(torch.equal, ours, plain))


def test_phases_take_the_steps_of_two_optimizers() -> None:
    recipes = {
        "first": Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "second": Recipe(torch.optim.Adam, {"lr": 0.1}),
    }
    model, expected = _model(), _model()
    phases = [Phase(name, name, lambda output, batch: output, recipe) for name, recipe in recipes.items()]
    optimizer = in_turn(phases).build(model)
    torchs = [recipe.cls(expected[name].parameters(), **recipe.settings) for name, recipe in recipes.items()]  # type: ignore[index]
    for step in range(6):
        for turn, name in enumerate(recipes):
            for trained in (model, expected):
                for other, module in trained.named_children():
                    module.requires_grad_(other == name)
            optimizer.zero_grad()
            torchs[turn].zero_grad()
            _loss(model, step).backward()
            _loss(expected, step).backward()
            optimizer.step()
            torchs[turn].step()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize(
    ("data", "inputs", "targets"),
    [((1, 2), 1, 2), ([1, 2], 1, 2), ({"a": 1}, {"a": 1}, None), ((1, 2, 3), (1, 2, 3), None), (5, 5, None)],
)
def test_the_halves_of_a_batch(data: Any, inputs: Any, targets: Any) -> None:
    batch = Batch(data, PLACE)
    assert (batch.inputs, batch.targets) == (inputs, targets)


def test_an_output_and_its_state() -> None:
    assert output_and_state(("output", "state")) == ("output", "state")
