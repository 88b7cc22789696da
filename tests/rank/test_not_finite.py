"""--on-nan: a training stops with the step, rank, rows and tensor, or leaves the step out as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import rank.poisoned as poisoned
from command import TESTS, samestep
from lane_marks import in_turn
from ranks import Ranks, RanksFailed, skip_unless_here
from said import said_by_ranks, says
from samestep.data.schedule import schedule_of
from samestep.rank.guards import not_finite_in
from samestep.records.plan import Plan, RunTask
from samestep.records.record import Record

JOB = f"{TESTS}/rank/poisoned.py:job"
STEPS = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as both:
        yield both


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as one:
        yield one


def trained(on: Ranks, engine: str, weights: Path, on_nan: Any = "skip", **settings: str) -> Record:
    training = RunTask(str(weights), every=0, on_nan=on_nan)
    return on.work(Plan("", 0.0, JOB, settings, engine, trainings=(training,)))


def by_hand(job: Any) -> tuple[Mapping[str, torch.Tensor], list[int]]:
    """Trains without the steps that have the poisoned row. Returns the weights, and the steps that were left out."""
    model = job.model()
    optimizer = job.optimizer.build(model)
    scheduler = job.lr_scheduler(optimizer)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    schedule, left_out = schedule_of(job, 1), []
    for step in range(STEPS):
        (part,) = schedule.step(0, *divmod(step, schedule.steps_per_epoch))
        if poisoned.ROW in part.indices:
            left_out.append(step)
            scheduler.step()
            continue
        rows, targets = job.train[part.indices]
        optimizer.zero_grad()
        F.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        scheduler.step()
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 1 - 0.9)
    return {**model.state_dict(), **(averages if job.ema else {})}, left_out


@pytest.mark.parametrize(("value", "expected"), [(1e30, 0.0), (torch.inf, 1.0), (torch.nan, 1.0), (0.5, 0.0)])
def test_large_values_are_finite(value: float, expected: float) -> None:
    """Also where their squares are not."""
    tensors = [torch.ones(3), torch.tensor([[1.0, value]]), torch.ones(2, dtype=torch.bfloat16)]
    assert not_finite_in(tensors).item() == expected


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_left_out_alone_never_was(poison: Any, alone: Ranks, tmp_path: Path) -> None:
    """Weights, momentum, the average of the weights and BatchNorm's statistics, to the last bit."""
    record = trained(alone, "single", tmp_path / "w", poison=poison, norm="true", ema="true")
    expected, left_out = by_hand(poisoned.job(poison=poison, norm=True, ema=True))
    found = load_file(tmp_path / "w")
    assert left_out and record.training("run")[0].skipped_steps == len(left_out)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023


OTHERS = ("fsdp", "zero", "amp", "accelerate", "fabric", "fairscale", "hf", "horovod")
ENGINES = ["ddp", *(pytest.param(name, marks=in_turn(2, number)) for number, name in enumerate(OTHERS))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_is_left_out_on_all_ranks(engine: str, poison: Any, ranks: Ranks, tmp_path: Path) -> None:
    skip_unless_here(engine)
    expected, left_out = by_hand(poisoned.job(poison=poison))
    if engine in ("ddp", "zero", "fsdp", "amp"):
        record = trained(ranks, engine, tmp_path / "w", poison=poison)
    else:
        with Ranks(2, engine=engine) as own:
            record = trained(own, engine, tmp_path / "w", poison=poison)
            record.ranks  # noqa: B018 - read before the folder goes
    found = load_file(tmp_path / "w")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)
    assert [seen.skipped_steps for seen in record.training("run")] == [len(left_out)] * 2


def test_statistics_of_a_step_left_out_are_not_kept(ranks: Ranks, tmp_path: Path) -> None:
    trained(ranks, "ddp", tmp_path / "w", poison="loss", norm="true")
    found = load_file(tmp_path / "w")
    assert found["norm.num_batches_tracked"] == STEPS - 2
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.parametrize(
    ("settings", "said", "since"),
    [
        ({"poison": "loss"}, "loss_not_finite", "gradient_not_finite"),
        ({"poison": "gradient"}, "loss_not_finite", "weight_not_finite_before_the_step"),
        ({"poison": "gradient", "last": "true"}, "weight_not_finite_after_last_step", None),
    ],
)
def test_a_stop_names_step_rank_rows_and_tensor(
    settings: dict[str, str], said: str, since: str | None, ranks: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as failed:
        trained(ranks, "ddp", tmp_path / "w", "stop", **settings)
    found = said_by_ranks(str(failed.value), "NotFinite")
    says(found, said)
    assert found.fields["rank"] in (0, 1)
    if since is None:
        says(found, said, step=5, weight="scale")
    elif settings == {"poison": "gradient"}:
        says(found.fields["since"], since, weight="scale")
    else:
        assert found.fields["since"].id == since and found.fields["loss"] == "nan"
        schedule = schedule_of(poisoned.job(poison="loss"), 2)
        step = divmod(found.fields["step"], schedule.steps_per_epoch)
        (micro_batch,) = schedule.step(found.fields["rank"], *step)
        assert poisoned.ROW in micro_batch.indices
        says(found.fields["rows"], "rows", rows=micro_batch.indices.tolist(), count=8)
    assert not (tmp_path / "w").exists()


def test_an_endless_row_of_steps_left_out_ends_the_training(alone: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        trained(alone, "single", tmp_path / "w", poison="all")
    says(said_by_ranks(str(failed.value)), "all_latest_steps_skipped", count=100, step=99)


@pytest.mark.parametrize("engine", ["lightning", "deepspeed"])
def test_an_engine_that_cannot_leave_a_step_out_is_refused(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    line = ["run", JOB, "--engine", engine, "--nproc", "1", "--on-nan", "skip"]
    done = samestep(*line, out=tmp_path / "out")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("samestep: --on-nan skip: "), last
