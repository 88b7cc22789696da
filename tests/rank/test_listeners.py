"""What on_step, on_evaluation and --log are told of a training, and that none of them can end it."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import TESTS, samestep
from conformance.table import EXACT
from lane_marks import in_turn
from ranks import skip_unless_here
from samestep.commands.progress import TimeLeft
from samestep.commands.training_options import TrainOptions
from samestep.errors import UserError
from samestep.job import StepInfo
from samestep.rank.listeners import Called, Listeners, TensorBoard, Wandb
from samestep.rank.meter import Meter

WRITES_STEPS = f"{TESTS}/jobs/writes_steps.py:job"
ENGINES = [*(name for name in EXACT if name != "ddp"), "single"]
INFO = StepInfo(1, 0, 0.5, (0.1, 0.2), 16, 0.25, 0.05)


def told(engine: str, out: Path) -> None:
    """Runs two epochs of 5 steps on 2 ranks, and compares what was told with what results.json has."""
    lines = out / "lines.jsonl"
    ranks = [] if engine == "single" else ["--nproc", "2"]
    asked = ["--engine", engine, *ranks, "--set", f"file={lines}", "--log", "csv"]
    out.mkdir()
    done = samestep("run", WRITES_STEPS, *asked, "--json", "--out", str(out / "run"))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    heard = [json.loads(line) for line in lines.read_text().splitlines()]
    steps = [line for line in heard if "epoch" in line]
    assert [(line["step"], line["epoch"]) for line in steps] == [(n, (n - 1) // 5) for n in range(1, 11)]
    assert [line["rows"] for line in steps] == [16, 16, 16, 16, 9] * 2
    assert [line["rates"] for line in steps] == [[0.1]] * 5 + [[0.05]] * 5
    assert steps[-1]["loss"] == pytest.approx(results["final_loss"])
    assert all(line["speed"] > 0 for line in steps)
    evaluated = [line for line in heard if "evaluated" in line]
    assert evaluated == [{"evaluated": int(entry.pop("step")), **entry} for entry in results["curve"]]
    assert heard.index(evaluated[0]) == 5  # after the steps that were before it
    with open(out / "run" / "steps.csv") as file:
        table = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in table] == [line["loss"] for line in steps]
    assert list(table[0]) == ["step", "epoch", "loss", "lr", "samples_per_second", "wait_s"]
    with open(out / "run" / "evaluations.csv") as file:
        assert [float(line["accuracy"]) for line in csv.DictReader(file)] == [line["accuracy"] for line in evaluated]


def test_every_step_and_evaluation_is_told_once(tmp_path: Path) -> None:
    told("ddp", tmp_path / "out")


@pytest.mark.parametrize("engine", [pytest.param(name, marks=in_turn(2, n)) for n, name in enumerate(ENGINES)])
def test_every_step_is_told_on_every_engine(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    told(engine, tmp_path / "out")


def test_a_listener_that_fails_ends_no_training(tmp_path: Path) -> None:
    done = samestep("run", WRITES_STEPS, "--engine", "single", "--set", "fails=true", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for name in ("on_step", "on_evaluation"):
        warning = f"{name} raised ValueError: the disk is full ({TESTS}/jobs/writes_steps.py:"
        assert done.stderr.count(warning) == 1, done.stderr


def test_a_step_is_told_when_its_loss_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Two micro-batches a step, of weights 3 and 1; the meter reads eight losses when eight more have come."""
    import torch

    seen: list[StepInfo] = []
    watch, meter = Listeners([Called("x", step=seen.append)], lambda steps: 4 * steps), Meter(0, "cpu")
    meter.begin()
    for step in range(9):
        for weight in (3.0, 1.0):
            meter.loss(torch.tensor(step + weight), step, weight)
        meter.step()
        watch.step(step + 1, 0, meter)
    assert [info.step for info in seen] == [1, 2, 3, 4]
    watch.pause(meter)
    assert [info.loss for info in seen] == [step + 2.5 for step in range(9)]
    assert [info.rows for info in seen] == [4] * 9


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorbord", "--log tensorbord: did you mean 'tensorboard'?"),
        ("wandb", "--log wandb needs the package wandb, which is not installed: pip install 'samestep[wandb]'"),
    ],
)
def test_a_log_that_cannot_be_is_refused(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.commands.training_options.find_spec", lambda _: None)
    with pytest.raises(UserError) as error:
        TrainOptions(log=("csv", name)).plan(SimpleNamespace(evaluation=SimpleNamespace(metrics={})))
    assert str(error.value) == says


def test_tensorboard_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path)
    log.step(INFO)
    log.evaluation(1, {"loss": 0.25})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    assert found["evaluation/loss"] == 0.25 and found["train/loss"] == 0.5
    assert found["train/samples_per_second"] == 64 and found["train/lr_1"] == pytest.approx(0.2)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_is_written_offline(tmp_path: Path) -> None:
    log = Wandb(tmp_path)
    log.step(INFO)
    log.evaluation(1, {"loss": 0.25})
    log.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_the_time_left_is_estimated() -> None:
    left = TimeLeft()
    assert left.after(10, 110, 5.0) == ""
    assert left.after(20, 110, 15.0) == "0:01:30"
    assert left.after(2, 110, 20.0) == ""  # restarted
