"""The first module that computes something else than one process's, and the finding that names it."""

from __future__ import annotations

import pytest
import torch

from samestep.message import message
from samestep.proof.script.findings import differs
from samestep.proof.script.first_module import first_module_apart, with_module
from samestep.records.divided_models import ModuleRecord, Moments
from samestep.records.script import Finding, ScriptRecord

INPUTS, WEIGHT = torch.arange(1.0, 9).view(2, 4), torch.linspace(-1, 2, 12).view(4, 3)
PARTIAL = [INPUTS[:, :2] @ WEIGHT[:2], INPUTS[:, 2:] @ WEIGHT[2:]]


def moments(tensor: torch.Tensor) -> Moments:
    values = tensor.double()
    return Moments(tensor.numel(), [float(of.sum()) for of in (values, values.abs(), values**2, values**3)])


def rank(number: int, given: torch.Tensor, returned: torch.Tensor) -> ScriptRecord:
    modules = [
        ModuleRecord("up", moments(INPUTS), moments(given)),
        ModuleRecord("down", moments(given), moments(returned)),
    ]
    return ScriptRecord(number, 2, {}, [], [], "steps", [], 0.1, [], modules=modules)


ONE_PROCESS = rank(0, INPUTS, INPUTS @ WEIGHT)


@pytest.mark.parametrize(
    ("returned", "module"),
    [
        ([sum(PARTIAL), sum(PARTIAL)], None),
        (PARTIAL, "down"),  # never added up
        ([2 * sum(PARTIAL), 2 * sum(PARTIAL)], "down"),
        ([PARTIAL[0] + PARTIAL[1], PARTIAL[1]], "down"),  # on one rank alone
    ],
)
def test_the_module_that_returns_something_else(returned: list[torch.Tensor], module: str | None) -> None:
    ranks = [rank(n, INPUTS[:, 2 * n : 2 * n + 2], tensor) for n, tensor in enumerate(returned)]
    assert first_module_apart(ranks, ONE_PROCESS) == module
    cause = message("replica_gradient_apart", axis="tp", different=1)
    apart = differs("gradient", "gradient along tp", cause, step=0, expected=1.0, found=2.0)
    finding = with_module(apart, ranks, ONE_PROCESS, "tp", 2)
    assert finding.message.fields.get("module") == module
    assert finding.divergence and finding.divergence.cause == finding.message
    other = Finding("rows", "right", message("one_rank"))
    assert with_module(other, ranks, ONE_PROCESS, "tp", 2) == other


def nested(number: int, inner: torch.Tensor, outer: torch.Tensor, head: torch.Tensor) -> ScriptRecord:
    """A rank whose module 'down' is in one that adds its sums up, before a head."""
    given = INPUTS[:, 2 * number : 2 * number + 2] if number >= 0 else INPUTS
    modules = [
        ModuleRecord("mlp.down", moments(given), moments(inner)),
        ModuleRecord("mlp", moments(INPUTS), moments(outer)),
        ModuleRecord("head", moments(INPUTS), moments(head)),
        ModuleRecord("", moments(INPUTS), moments(head)),
    ]
    return ScriptRecord(max(number, 0), 2, {}, [], [], "steps", [], 0.1, [], modules=modules)


TOTAL = sum(PARTIAL)
ONE_NESTED = nested(-1, TOTAL, TOTAL, TOTAL)


@pytest.mark.parametrize(
    ("outer", "head", "module"),
    [
        ([TOTAL, TOTAL], [TOTAL, TOTAL], None),
        ([TOTAL, TOTAL], [2 * TOTAL, 2 * TOTAL], "head"),
        (PARTIAL, PARTIAL, "mlp.down"),  # never added up, by nothing around it
        ([2 * TOTAL, 2 * TOTAL], [TOTAL, TOTAL], "mlp.down"),  # added up twice: in the module, or around it
    ],
)
def test_sums_that_a_module_around_adds_up(
    outer: list[torch.Tensor], head: list[torch.Tensor], module: str | None
) -> None:
    ranks = [nested(n, PARTIAL[n], outer[n], head[n]) for n in range(2)]
    assert first_module_apart(ranks, ONE_NESTED) == module
