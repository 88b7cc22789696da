"""The first module that computes something else than one process's, and the finding that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from said import says
from samestep.judge.findings import differs
from samestep.judge.first_module import first_module_apart, with_module, with_places
from samestep.message import message
from samestep.records.divided_models import ModuleRecord, Moments
from samestep.records.findings import Finding
from samestep.records.script import LossRecord, MicroBatchRecord, ScriptRecord, StepRecord

INPUTS, WEIGHT = torch.arange(1.0, 9).view(2, 4), torch.linspace(-1, 2, 12).view(4, 3)
STEP = StepRecord(0, [], [], [], [], 0, None, {}, [])
PARTIAL = [INPUTS[:, :2] @ WEIGHT[:2], INPUTS[:, 2:] @ WEIGHT[2:]]


def moments(tensor: torch.Tensor) -> Moments:
    values = tensor.double()
    return Moments(tensor.numel(), [float(of.sum()) for of in (values, values.abs(), values**2, values**3)])


def rank(number: int, given: torch.Tensor, returned: torch.Tensor) -> ScriptRecord:
    modules = [
        ModuleRecord("up", moments(INPUTS), moments(given)),
        ModuleRecord("down", moments(given), moments(returned)),
    ]
    return ScriptRecord(number, 2, {}, [STEP], [], "steps", [], 0.1, [], modules=modules)


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
    return ScriptRecord(max(number, 0), 2, {}, [STEP], [], "steps", [], 0.1, [], modules=modules)


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


def with_loss(
    rank: ScriptRecord,
    value: float,
    *,
    targets: int,
    weight: float = 1.0,
    added: int = 4,
    own_statistics: bool = False,
) -> ScriptRecord:
    """A rank whose first step has a mean over targets, and a sum of `added` values."""
    terms = [LossRecord(1.0, "mean", targets, "NllLoss", classes=3), LossRecord(weight, "sum", added, "Sum")]
    batch = MicroBatchRecord([], terms, value=value)
    step = StepRecord(0, [batch], [], [], [], 0, None, {}, [], own_statistics=own_statistics)
    return replace(rank, steps=[step])


def placed(ranks: list[ScriptRecord], one_process: ScriptRecord) -> Finding:
    cause = message("loss_depends_on_ranks")
    finding = differs("replayed gradient", "gradient", cause, step=0, expected=1.0, found=2.0)
    weights = Finding("replayed weights", "right", message("one_rank"))
    found, followed = with_places([finding, weights], ranks, one_process)
    assert followed.answer == ("unknown" if found.answer == "unknown" else "right")
    return found


# Ranks that read a half of the rows each, and one process that has both.
HALVES = [INPUTS[:1], INPUTS[1:]]
WHOLE = with_loss(ONE_PROCESS, 2.0, targets=8)


def halves(*, given: float = 1.0, returned: float = 1.0, value: float = 2.0, **of_loss: Any) -> list[ScriptRecord]:
    """Records of ranks that read a half of the rows each. given, returned: of the last module, times one process's."""
    records = []
    for number, half in enumerate(HALVES):
        modules = [
            ModuleRecord("up", moments(half), moments(half)),
            ModuleRecord("down", moments(given * half), moments(returned * half @ WEIGHT)),
        ]
        record = replace(rank(number, half, half), modules=modules)
        records.append(with_loss(record, value, **{"targets": 4, **of_loss}))
    return records


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        (halves(), "loss_depends_on_ranks"),  # all that is known is as in one process
        (halves(given=1.5, returned=1.5), "module_is_given_otherwise"),
        (halves(returned=1.5), "module_depends_on_ranks"),
        (halves(targets=3, value=1.9), "targets_of_ranks_apart"),
        (halves(value=1.9), "loss_of_same_outputs_apart"),
        (halves(value=1.9, own_statistics=True), "loss_normalises_own_rows"),
        (halves(targets=3, own_statistics=True), "targets_of_ranks_apart"),
    ],
)
def test_the_place_where_the_ranks_first_have_something_else(ranks: list[ScriptRecord], cause: str) -> None:
    found = placed(ranks, WHOLE)
    assert found.message.id == cause
    if found.divergence:
        assert found.divergence.cause == found.message


def test_a_sum_over_rows_that_enters_as_in_one_process_is_told_from_others() -> None:
    """One that is divided, and a penalty on the weights, which adds up as many values on a rank as in one process."""
    assert placed(halves(value=1.9, added=2), WHOLE).message.fields["weight"] == 1.0
    assert placed(halves(value=1.9, added=2, weight=2.0), WHOLE).message.fields["weight"] is None
    assert placed(halves(value=1.9, added=4), WHOLE).message.fields["weight"] is None


def test_another_loss_is_no_term_where_the_ranks_have_unequally_many_targets() -> None:
    """Means of means have another loss of the same outputs, too."""
    ranks = halves(value=1.9)
    uneven = [with_loss(rank, 1.9, targets=targets) for rank, targets in zip(ranks, (3, 5), strict=True)]
    cause = message("mean_of_rank_means_or_a_term")
    finding = differs("replayed gradient", "gradient", cause, step=0, expected=1.0, found=2.0)
    assert with_places([finding], uneven, WHOLE)[0].message == cause
    assert with_places([finding], ranks, WHOLE)[0].message.id == "loss_of_same_outputs_apart"


@pytest.mark.parametrize(
    ("dtype", "cause"), [("float32", "module_depends_on_ranks"), ("bfloat16", "loss_of_same_outputs_apart")]
)
def test_the_rounding_of_16_bits_is_no_other_output(dtype: str, cause: str) -> None:
    ranks = [
        replace(rank, steps=[replace(rank.steps[0], computed=[dtype])]) for rank in halves(value=1.5, returned=1.003)
    ]
    assert placed(ranks, WHOLE).message.id == cause


def test_a_model_without_a_name_of_its_own_is_called_the_model() -> None:
    def renamed(record: ScriptRecord) -> ScriptRecord:
        return replace(record, modules=[replace(module, name="") for module in record.modules[-1:]])

    found = placed([renamed(rank) for rank in halves(returned=1.5)], renamed(WHOLE))
    says(found.message, "module_depends_on_ranks", module=message("the_model_itself"))


def test_the_loss_of_outputs_that_each_rank_has_whole() -> None:
    cause = message("replica_is_no_one_process", axis="tp", factor=None, told=None)
    apart = differs("replayed gradient", "gradient along tp", cause, step=0, expected=1.0, found=2.0)
    for value, named in ((2.7, "loss_of_whole_outputs_apart"), (2.0, "replica_is_no_one_process")):
        ranks = [with_loss(rank(number, INPUTS, INPUTS @ WEIGHT), value, targets=8) for number in range(2)]
        assert with_module(apart, ranks, WHOLE, "tp", 2).message.id == named
