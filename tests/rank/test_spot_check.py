"""--spot-check: a step that ranks take is replayed in one process, and a rank that computes something else is named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import replayed
import torch
from torch import Tensor, nn

from command import TESTS, samestep
from ranks import skip_unless_here
from samestep import engine as engines
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.job import Job
from samestep.rank.spot_check import WAITING, ReplayProcess, SpotChecks
from samestep.records.files import read
from samestep.records.run_results import RunResults
from samestep.records.spot_check import CHECKS, SpotCheck, SpotCheckPlan, spot_checks_in
from samestep.records.training_record import MicroBatchRecord
from samestep.reference import Rates, ReplicaBefore, StepAfter, StepBefore
from samestep.tasks import replay_step
from samestep.tasks.judge_step import RankAfter, StepJudge, TrainedStep
from samestep.training import Run
from samestep.world import World

JOB = f"{TESTS}/rank/replayed.py:job"
TWIN_JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout, clipped, accumulated": {"dropout": 0.3, "clip": 0.5, "accumulate": 3, "optimizer": "adamw"},
    "BatchNorm, by epoch": {"norm": True, "schedule": "epoch", "ema": 0.9},
    "weighted, augmented, by step": {"weighted": True, "augmented": True, "schedule": "step"},
}


class Replays:
    """In place of the process: the steps that were announced."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def announce(self, step: int) -> None:
        self.steps.append(step)

    def forget_checks(self) -> None:
        pass


def checked(job: Job, folder: Path, every: int = 2, steps: int = 6) -> list[SpotCheck]:
    """Trains in this process as `single`, and replays the steps that are due."""
    folder.mkdir(exist_ok=True)
    world, replays = World(), Replays()
    spot_checks = SpotChecks(world, every, steps=steps, folder=folder, replays=replays)  # type: ignore[arg-type]
    run = Run(job, world, steps, spot_checks=spot_checks)
    engines.load("single").train(job, world, run)
    spot_checks.finish_writing()
    plan = SpotCheckPlan("", {}, Layout(1), 1, "cpu", str(folder / CHECKS))
    with patch.object(replay_step, "build", lambda *_, **__: job), patch.dict(os.environ):
        os.environ.pop("RANK", None)
        player = replay_step.StepReplays(plan, folder)
        return [player.check(step) for step in replays.steps]


@pytest.mark.parametrize("name", TWIN_JOBS)
def test_a_healthy_training_is_its_replay_bit_by_bit(name: str, tmp_path: Path) -> None:
    checks = checked(replayed.job(**TWIN_JOBS[name]), tmp_path)
    assert [check.step for check in checks] == [0, 1, 3, 5]  # the first, each second, the last
    assert [(check.verdict, check.bitwise) for check in checks] == [("same", True)] * 4


FAULTS = {
    "gradient": "spot_check_gradient_differs",
    "bit": "spot_check_gradient_differs",
    "data": "spot_check_loss_differs",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_step_is_named_with_its_step(fault: Any, tmp_path: Path) -> None:
    with patch.dict(os.environ, RANK="0"):
        checks = checked(replayed.job(fault=fault, at=3, on=0), tmp_path)
    assert [check.verdict for check in checks] == ["same", "same", "differs", "same"]
    found = checks[2].found
    assert found and (found.id, found.fields["step"], checks[2].ranks) == (FAULTS[fault], 3, [0])


def test_an_update_that_goes_wrong_is_named(tmp_path: Path) -> None:
    """From step 3 on the optimizer steps with twice the gradient: a hook of its own, as a late fault of an engine."""
    job = replayed.job()
    taken = {"steps": 0}

    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            taken["steps"] += 1
            if taken["steps"] > 3 and taken["steps"] <= 6:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad *= 2.0
            return super().step(closure)

    checks = checked(replace(job, optimizer=replace(job.optimizer, cls=Late)), tmp_path)
    assert [check.verdict for check in checks] == ["same", "same", "differs", "differs"]
    assert checks[2].found and checks[2].found.id == "spot_check_update_differs"


def test_a_rate_is_counted_from_the_beginning(tmp_path: Path) -> None:
    job = replayed.job(schedule="step")
    with patch.object(Job, "moves_lr", lambda self, batch: batch.micro_batch.step < 2):  # a schedule that ends
        checks = checked(job, tmp_path)
    assert [check.verdict for check in checks] == ["same", "same", "differs", "differs"]
    assert checks[2].found and checks[2].found.id == "spot_check_rate_differs"


def test_rates_are_those_of_torchs_scheduler() -> None:
    job = replayed.job(schedule="epoch")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, expected = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), []
    for step in range(21):
        expected.append([optimizer.param_groups[0]["lr"]])
        optimizer.step()
        if step % 7 == 6:
            scheduler.step()
    rates = Rates(job)
    assert [rates.at(step) for step in range(21)] == expected


def test_what_forward_keeps_in_attributes_is_replayed(tmp_path: Path) -> None:
    """A model that counts its steps, and one that keeps the last output."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count, self.last = nn.Linear(6, 3), 0, torch.zeros(3)

        def forward(self, rows: Tensor) -> Tensor:
            self.count += 1
            output: Tensor = self.layer(rows) * (1 + self.count / 10) + self.last
            self.last = output.detach().mean(0)
            return output

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Counting()

    job = replace(replayed.job(), model=model, forward=lambda network, batch: network(batch.inputs))
    assert {check.verdict for check in checked(job, tmp_path)} == {"same"}


def test_a_step_is_left_out_and_said_where_replays_do_not_keep_up(tmp_path: Path) -> None:
    class Slow(Replays, ReplayProcess):  # nothing is ever replayed
        _checks = tmp_path / CHECKS

    spot_checks = SpotChecks(World(), 1, steps=20, folder=tmp_path, replays=(slow := Slow()))
    engines.load("single").train(job := replayed.job(), World(), Run(job, World(), 20, spot_checks=spot_checks))
    spot_checks.finish_writing()
    assert len(slow.steps) == WAITING
    left_out = [(check.step, check.verdict, check.found and check.found.id) for check in spot_checks_in(slow._checks)]
    assert left_out == [(step, "unknown", "replays_do_not_keep_up") for step in range(WAITING, 20)]


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / CHECKS
    file.write_text('{"step": 3, "verdict": "same"}\n{"step": 7, "verd')
    assert spot_checks_in(file) == [SpotCheck(3, "same")] and spot_checks_in(tmp_path / "none") == []


@pytest.mark.check
@pytest.mark.parametrize(
    ("engine", "settings", "found", "ranks"),
    [
        ("ddp", {"fault": "bit", "at": 5}, "spot_check_gradient_differs", [1]),
        pytest.param("ddp", {"norm": True, "dropout": 0.2, "last": "drop"}, None, [], marks=pytest.mark.full),
        ("fsdp", {"dropout": 0.2, "ema": 0.9}, None, []),
        ("fsdp", {"fault": "data", "at": 5}, "spot_check_loss_differs", [1]),
        pytest.param(
            "zero", {"fault": "gradient", "at": 5}, "spot_check_gradient_differs", [1], marks=pytest.mark.full
        ),
        pytest.param("amp", {"optimizer": "adamw", "dropout": 0.2}, None, [], marks=pytest.mark.full),
        ("horovod", {"accumulate": 2, "clip": 0.5}, None, []),
    ],
)
def test_ranks_are_replayed_while_they_train(
    engine: str, settings: dict[str, Any], found: str | None, ranks: list[int], tmp_path: Path
) -> None:
    skip_unless_here(engine)
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={str(value).lower()}")]
    line = ["run", JOB, "--engine", engine, "--nproc", "2", "--spot-check", "every=3", *words]
    done = samestep(*line, out=tmp_path / "out")
    assert done.returncode == (1 if found else 0), done.stderr
    checks = read(RunResults, tmp_path / "out" / "results.json").spot_checks
    differ = [(check.step, check.found and check.found.id, check.ranks) for check in checks if check.verdict != "same"]
    assert len(checks) >= 7 and differ == ([(5, found, ranks)] if found else [])


def test_a_replay_that_overflows_says_nothing(tmp_path: Path) -> None:
    """A replay adds the gradients of all replicas up before it divides, and overflows where the ranks do not."""
    before = StepBefore(3, {"weight": torch.ones(2)}, {}, [], {}, {}, [ReplicaBefore({})])
    rank = RankAfter([[0]], [["a"]], [torch.tensor(1.0)], {}, {"weight": (torch.ones(2), [0])}, {})
    seen = MicroBatchRecord(0, 3, 0, indices=[0], weight=1.0, digests=["a"], loss=1.0)
    for value, differs in ((1.0, False), (2.0, True), (torch.nan, None)):
        replay = StepAfter([[seen]], [{}], {"weight": torch.tensor([1.0, value])}, [{}], {}, {}, [{}])
        judge = StepJudge(TrainedStep(before, [], [rank], {}, {}), replay, lambda replay=replay: [replay], None)
        if differs is None:
            with pytest.raises(UserError) as unknown:
                judge.finding()
            assert unknown.value.message.id == "replay_overflows"
        else:
            assert bool(judge.finding()) == differs
