"""A module that ranks gather at each call, and that forward calls now more and now less often, is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from inspected_job import demands, inspected_job
from said import refuses
from samestep import Job, Recipe
from samestep.commands.engine_rows import refusal
from samestep.engines import fsdp
from samestep.message import Message
from samestep.records.inspection import VaryingCalls
from samestep.tasks.inspect.dry_run import varying_calls
from samestep.tasks.inspect.engines import inspect_engines

ROWS = torch.stack([torch.arange(20.0), torch.zeros(20)], 1)


class Net(nn.Module):
    def __init__(self, calls: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        self.calls = calls

    def forward(self, inputs: Tensor) -> Tensor:
        return self.calls(self.blocks, self.normed(inputs) if inputs.dim() else inputs)


def plain(blocks: Any, rows: Tensor) -> Tensor:
    output: Tensor = blocks(blocks[0](rows))  # twice, in every pass
    return output


def by_row(blocks: Any, rows: Tensor) -> Tensor:
    return torch.stack([blocks[1](row) for row in rows])


def for_many(blocks: Any, rows: Tensor) -> Tensor:
    output: Tensor = blocks[1](rows) if len(rows) > 3 else rows
    return output


def drawn(blocks: Any, rows: Tensor) -> Tensor:
    for _ in range(random.choice(range(1000))):
        rows = blocks[0](rows)
    return rows


CASES: dict[str, tuple[Callable[..., Tensor], VaryingCalls | None]] = {
    "as often": (plain, None),
    "per row": (by_row, VaryingCalls("blocks.1", "rows")),
    "for many rows": (for_many, VaryingCalls("blocks.1", "rows")),
    "by chance": (drawn, VaryingCalls("blocks.0", "data")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_unit_that_is_not_called_as_often_is_named(case: str) -> None:
    calls, expected = CASES[case]
    job = Job(
        model=lambda: Net(calls),
        criterion=lambda output, batch: output.mean(),
        forward=lambda model, batch: model(*batch.inputs),
        train=TensorDataset(ROWS),
        optimizer=Recipe(torch.optim.SGD),
        global_batch=8,
    )
    found = varying_calls(job, {"fsdp": fsdp.units}, 2, "cpu")
    assert found == ({"fsdp": expected} if expected else {})
    assert not varying_calls(job, {"fsdp": partial(fsdp.units, wrap="root")}, 2, "cpu")


JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Linear(2, 2)

    def forward(self, inputs):
        return torch.stack([self.row(row) for row in inputs])

def job(global_batch: int = 8):
    return Job(model=Net, criterion=lambda output, batch: output.mean(), train=TensorDataset(torch.ones(20, 2)),
        forward=lambda model, batch: model(*batch.inputs), optimizer=Recipe(torch.optim.SGD), global_batch=global_batch)

def cached():
    net = Net()
    return Job(model=lambda: nn.Sequential(net), criterion=lambda output, batch: output.mean(), train=[torch.ones(2)],
        optimizer=Recipe(torch.optim.SGD), global_batch=1)
"""


def test_fsdp_refuses_it_where_ranks_may_get_other_rows(tmp_path: Path) -> None:
    """Not with the settings that the sentence gives; other engines take it."""
    file = tmp_path / "per_row_job.py"
    file.write_text(JOB)

    def reason(engine: str = "fsdp", options: dict[str, str] = {}, **settings: str) -> Message | None:  # noqa: B006
        rows = inspect_engines(("cpu",), 2, options, [engine])
        row = next(row for row in rows if row.name == engine)
        return refusal(row, inspected_job(str(file), settings, 2, steps=1, engines=demands(row)))

    called = {"engine": "fsdp", "unit": "row"}
    assert reason() == Message("unit_called_by_rows", {**called, "setting": "--set last=drop"})
    assert reason(global_batch="7", last="drop") == Message("unit_called_by_rows", {**called, "setting": None})
    assert reason(last="drop") is reason(options={"fsdp.wrap": "root"}) is reason("ddp") is None


def test_a_model_that_is_not_built_anew_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cached_job.py"
    file.write_text(JOB)
    with refuses("model_is_not_built_anew", parameter="0.row.weight"):
        inspected_job(f"{file}:cached", {}, 1, steps=1)
