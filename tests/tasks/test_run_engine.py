"""Errors of an engine that are refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mutations.jobs import warming
from ranks import Ranks, RanksFailed, prove
from said import refuses, said_by_ranks, says, tells
from samestep import Job, Recipe
from samestep.engine import Checks
from samestep.errors import Refused
from samestep.rank.step import explain_dtypes
from samestep.tasks.run_engine import run_engine
from samestep.world import World

SAID = "FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}"


@pytest.mark.parametrize(("said", "refused"), [(SAID, True), ("assert len(rows) > 0", False)])
def test_fsdp_of_several_dtypes_is_a_refusal(said: str, refused: bool) -> None:
    def train(*_: Any) -> None:
        raise AssertionError(said)

    engine: Any = SimpleNamespace(train=train, fragments=None, checks=Checks(explain=explain_dtypes))
    job: Any = SimpleNamespace(
        sync_batchnorm=False,
        optimizer=Recipe(torch.optim.SGD),
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()),
    )
    with pytest.raises(Refused if refused else AssertionError) as raised:
        run_engine(engine, job, World(), SimpleNamespace(), {})  # type: ignore[arg-type]
    if isinstance(raised.value, Refused):
        assert raised.value.message.id == "fsdp_shards_one_dtype_together"
        assert raised.value.message.fields["dtypes"] == ["bfloat16", "float32"]


@pytest.mark.parametrize("read", ["scale", "weigth", "module.scale"])
def test_an_attribute_of_a_model_that_is_wrapped_is_a_refusal(read: str) -> None:
    """Not one that the model has not itself; and through `module` it is there."""

    class Scaled(nn.Linear):
        scale = 0.5

    def train(*_: Any) -> float:
        return float(attrgetter(read)(nn.DataParallel(Scaled(2, 2))))

    job: Any = SimpleNamespace(sync_batchnorm=False, optimizer=Recipe(torch.optim.SGD), model=lambda: Scaled(2, 2))
    engine: Any = SimpleNamespace(train=train, fragments=None, checks=Checks())
    run: Any = SimpleNamespace()
    if read == "scale":
        fields = {"attribute": "scale", "wrapper": "DataParallel", "model": "Scaled"}
        with refuses("forward_reads_a_wrapped_model", kind=Refused, **fields):
            run_engine(engine, job, World(), run, {})
    elif read == "weigth":
        with pytest.raises(AttributeError):
            run_engine(engine, job, World(), run, {})
    else:
        assert run_engine(engine, job, World(), run, {}) == 0.5


@pytest.mark.parametrize("last", [True, False])
def test_a_parameter_in_another_memory_format_is_a_refusal(last: bool) -> None:
    def train(*_: Any) -> None:
        raise NotImplementedError("FSDP does not support non-contiguous parameters yet")

    memory_format: Any = torch.channels_last if last else torch.contiguous_format
    engine: Any = SimpleNamespace(train=train, fragments=None, checks=Checks())
    job: Any = SimpleNamespace(
        sync_batchnorm=False,
        optimizer=Recipe(torch.optim.SGD),
        model=lambda: nn.Conv2d(3, 2, 3).to(memory_format=memory_format),
    )
    with pytest.raises(Refused if last else NotImplementedError) as raised:
        run_engine(engine, job, World(), SimpleNamespace(), {})  # type: ignore[arg-type]
    if isinstance(raised.value, Refused):
        says(raised.value.message, "parameter_is_not_contiguous", parameter="weight")


class Own(torch.optim.Optimizer):
    """Momentum whose state is made like the parameter, or of its shape alone, which is no DTensor."""

    def __init__(self, parameters: Any, lr: float = 0.1, like: bool = True) -> None:
        super().__init__(parameters, {"lr": lr})
        self.like = like

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                made = torch.zeros_like(p) if self.like else torch.zeros(p.shape, dtype=p.dtype)
                buffer = self.state[p].setdefault("buffer", made)
                p.sub_(group["lr"] * buffer.mul_(0.9).add_(p.grad))


def own(like: bool = True) -> Job:
    return replace(warming(), optimizer=Recipe(Own, {"lr": 0.01, "like": like}), scheduler=None)


def test_an_own_optimizer_that_takes_no_shards_is_a_refusal(reference_rank: Ranks) -> None:
    with Ranks(2, "fsdp", threads=True) as ranks:
        assert prove(reference_rank, ranks, f"{__file__}:own", "fsdp").verdict == "same"
        with pytest.raises(RanksFailed) as raised:
            prove(reference_rank, ranks, f"{__file__}:own", "fsdp", {"like": "false"})
        printed = str(raised.value)
        if "optimizer_raised_on_shards" in printed:  # a process without sentences
            says(said_by_ranks(printed, "Refused"), "optimizer_raised_on_shards", optimizer="Own", method="step")
        else:
            assert tells(printed, "optimizer_raised_on_shards", optimizer="Own", method="step"), printed
