"""fsdp: a parameter that is read outside of its unit's forward gives the same step, or is named with what helps.

One process, whose gloo group has one rank: FSDP gathers and frees as it does on many.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from said import refuses
from samestep import Job, Recipe
from samestep.engine import load
from samestep.errors import Refused
from samestep.job.walk import leaves_of
from samestep.message import message
from samestep.rank.fsdp_units import units_of
from samestep.tasks.run_engine import run_engine
from samestep.training import Run
from samestep.world import World

WHOLE = {"wrap": "root", "reshard": False}  # the settings that the sentences give


@dataclass
class Pair:
    output: Tensor
    parameter: Tensor


class Net(nn.Module):
    """reads: what its forward returns, from (model, inputs, hidden, output)."""

    def __init__(self, reads: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.scale = nn.Linear(4, 1), nn.Parameter(torch.full((1,), 0.1))
        self.kept: Any = None
        self.reads = reads

    def forward(self, inputs: Tensor) -> Any:
        inputs = inputs.detach().requires_grad_()
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.reads(self, inputs, hidden, self.head(hidden))


def slope(model: Net, inputs: Tensor, hidden: Tensor, output: Tensor) -> Any:
    return output, torch.autograd.grad(output.sum(), inputs, create_graph=True)[0]


def keep_view(model: Net, inputs: Tensor, hidden: Tensor, output: Tensor) -> Any:
    model.kept = [model.scale.view(1)]
    return output


def keep(model: Net, inputs: Tensor, hidden: Tensor, output: Tensor) -> Any:
    model.kept = model.scale
    return output


def total(output: Any) -> Tensor:
    """The mean of all that a model returns."""
    return torch.stack([value.pow(2).mean() for value in leaves_of(output)]).sum()


def trained(engine: str, reads: Callable[..., Any], loss: Callable[..., Tensor], **settings: Any) -> dict[str, Tensor]:
    """The weights after two steps. loss: (model, output) -> scalar."""
    models: list[Net] = []

    def model() -> nn.Module:
        models.append(Net(reads))
        return models[-1]

    rows = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    job = Job(
        model=model,
        forward=lambda net, batch: net(*batch.inputs),
        criterion=lambda output, batch: loss(models[-1], output),
        train=rows,
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        global_batch=4,
    )
    state = run_engine(load(engine), job, World(), Run(job, World(), 2), settings)
    return {name: value for name, value in state.items() if name != "kept"}


RETURNED: dict[str, Callable[..., Any]] = {
    "parameter": lambda model, inputs, hidden, output: (output, model.scale),
    "view": lambda model, inputs, hidden, output: {"all": output, "view": model.scale.view(1, 1).expand(4, 1)},
    "dataclass": lambda model, inputs, hidden, output: Pair(output, model.head.weight),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_unit_may_return_its_parameters(case: str, alone: None) -> None:
    def loss(model: Net, output: Any) -> Tensor:
        return total(output)

    expected = trained("single", RETURNED[case], loss)
    found = trained("fsdp", RETURNED[case], loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def plain(model: Net, inputs: Tensor, hidden: Tensor, output: Tensor) -> Any:
    return output


def through_a_name(model: Net, inputs: Tensor, hidden: Tensor, output: Tensor) -> Any:
    block = model.blocks[1]
    return output, F.linear(hidden, block.weight)


OUTSIDE: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], str]] = {
    "criterion": (plain, lambda model, output: total([output, model.blocks[0].weight]), "blocks.0.weight"),
    "penalty of all": (plain, lambda model, output: total([output, *model.parameters()]), "head.bias"),
    "kept view": (keep_view, lambda model, output: total([output, *model.kept]), "scale"),
    "another unit's": (through_a_name, lambda model, output: total(output), "blocks.1.weight"),
    "a derivative": (slope, lambda model, output: total(output), ".weight"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_is_read_outside_of_its_unit_is_named(case: str, alone: None) -> None:
    reads, loss, name = OUTSIDE[case]
    expected = trained("single", reads, loss)
    found = trained("fsdp", reads, loss, **WHOLE)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(Refused) as refused:
        trained("fsdp", reads, loss)
    said = refused.value.message
    assert said.id in ("shard_read_outside_of_its_unit", "second_derivative_reads_a_shard")
    assert said.fields["parameter"].endswith(name) and said.fields["remedy"].id == "keep_fsdp_parameters_whole"


def test_what_no_setting_helps_says_what_to_write(alone: None) -> None:
    with refuses("forward_keeps_a_parameter_that_fsdp_frees", attribute="kept"):
        trained("fsdp", keep, lambda model, output: total([output, model.kept]))


def test_a_container_that_fsdp_does_not_open_is_refused(alone: None) -> None:
    names = {"module": "Net", "container": "UserDict"}
    with refuses("fsdp_does_not_look_into_what_a_module_returns", **names):
        trained("fsdp", lambda *values: UserDict(all=values[-1]), lambda model, output: output["all"].mean())


def test_a_gradient_of_a_gradient_in_the_criterion_is_refused(alone: None) -> None:
    def loss(model: Net, output: Any) -> Tensor:
        value, inputs = output
        return total([value, torch.autograd.grad(value.sum(), inputs, create_graph=True)[0]])

    with refuses("second_derivative_reads_a_shard", remedy=message("compute_inside_of_forward")):
        trained("fsdp", lambda model, inputs, hidden, output: (output, inputs), loss, **WHOLE)


class Reader(nn.Module):
    """Reads parameters of its children by an index, and in a property."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.plain = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    @property
    def tied(self) -> Tensor:
        return self.blocks[1].weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.plain(inputs) @ self.blocks[0].weight @ self.tied @ self.normed.weight


def test_units_are_found_without_running_the_model() -> None:
    """spectral_norm moves its buffers whenever its weight is read."""
    model = Reader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in units_of(model, "Linear")] == ["blocks.2"]
    assert sorted(names[unit] for unit in units_of(model, "children")) == ["blocks.2", "plain"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
