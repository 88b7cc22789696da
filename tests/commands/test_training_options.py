"""A training's options travel whole to the command that is typed elsewhere."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import samestep
from samestep.commands import cli
from samestep.commands.command_options import SlurmOptions
from samestep.commands.options import Options, arguments
from samestep.commands.other_machines import MAY_DIFFER, options_of
from samestep.commands.submit import slurm_script
from samestep.commands.training_options import LOGS, TrainOptions
from samestep.errors import UserError
from samestep.rank import listeners
from samestep.records.plan import EvaluateTask, RunTask

# What a plan needs of a job.
JOB: Any = SimpleNamespace(
    evaluation=SimpleNamespace(metrics={"accuracy": "max", "error": "min"}), model=SimpleNamespace(pretrained=())
)


def test_options_are_words_again() -> None:
    words = arguments(
        TrainOptions(init=Path("/w.safetensors"), evaluate_every=3, best="loss", patience=2), TrainOptions
    )
    assert words == ["--init", "/w.safetensors", "--evaluate-every", "3", "--best", "loss", "--patience", "2"]
    assert arguments(TrainOptions(evaluate_steps=7), TrainOptions) == ["--evaluate-steps", "7"]
    assert arguments(TrainOptions(log=("csv", "wandb")), TrainOptions) == ["--log", "csv,wandb"]
    assert arguments(TrainOptions(), TrainOptions) == []


@pytest.mark.parametrize(
    ("best", "kept"),
    [("accuracy", ("accuracy", "max")), ("error", ("error", "min")), ("accuracy:min", ("accuracy", "min")), ("", None)],
)
def test_the_best_weights_are_by_the_metrics_direction_or_the_one_that_is_given(
    best: str, kept: tuple[str, str] | None
) -> None:
    assert TrainOptions(best=best).plan(JOB).best == kept


@pytest.mark.parametrize(
    ("options", "every"),
    [
        (TrainOptions(), (1, 0)),
        (TrainOptions(evaluate_every=0), (0, 0)),
        (TrainOptions(evaluate_steps=7), (0, 7)),
        (TrainOptions(evaluate_every=3, evaluate_steps=7), (3, 7)),
    ],
)
def test_steps_replace_the_epochs_unless_both_are_given(options: TrainOptions, every: tuple[int, int]) -> None:
    planned = options.plan(JOB)
    assert (planned.every, planned.every_steps) == every


TRAIN, SCORE = RunTask("w"), EvaluateTask("w", "f00d")
DECISIVE: dict[str, object] = {
    "init_sha256": "ab",
    "every": 2,
    "every_steps": 3,
    "best": ("loss", "min"),
    "patience": 4,
    "on_nan": "skip",
    "check_replicas": 5,
}


@pytest.mark.parametrize("name", sorted({each.name for each in (*fields(RunTask), *fields(EvaluateTask))} - MAY_DIFFER))
def test_machines_and_checkpoints_compare_every_option_that_decides_what_is_trained(name: str) -> None:
    """All that are not named as those that may differ: a new option is in one of the two."""
    of = [each for each in (TRAIN, SCORE) if hasattr(each, name)]
    for training in of:
        assert options_of(replace(training, **{name: DECISIVE[name]})) != options_of(training)
    assert options_of(replace(TRAIN, every=2, best=("loss", "min"), keep=9)) == "every=2 best=loss:min"


@dataclass(frozen=True)
class Switches(Options):
    on: bool = False
    off: bool = True


def test_a_switch_is_one_word() -> None:
    assert arguments(Switches(on=True, off=False), Switches) == ["--on", "--no-off"]


def test_every_log_has_a_listener() -> None:
    assert listeners.LOGS.keys() == LOGS.keys()


@pytest.mark.parametrize("command", ["run", "slurm"])
def test_every_field_is_an_option_and_an_argument(command: str) -> None:
    asked = set(inspect.signature(getattr(cli, command)).parameters)
    names = {field.name for field in fields(TrainOptions)}
    assert names <= asked and names <= set(inspect.signature(samestep.run).parameters)
    machines = {field.name for field in fields(samestep.MachineOptions)}
    assert machines <= asked if command == "run" else machines & asked == {"threads"}


@pytest.mark.parametrize(
    "given",
    [
        {"best": ":max"},
        {"best": "loss:most"},
        {"best": "loss", "evaluate_every": 0},
        {"log": ("cvs",)},
        {"on_nan": "go on"},
        {"checkpoint_every": "x"},
        {"profile": "steps="},
        {"spot_check": "always"},
    ],
    ids=lambda given: "_".join(given),
)
def test_a_batch_system_is_given_no_value_that_no_job_takes(given: dict[str, Any]) -> None:
    """The job would refuse it in hours, when its turn has come. Whether it has such a metric is not known here."""
    with pytest.raises(UserError):
        slurm_script(SlurmOptions(job="digits", **given))
    assert slurm_script(SlurmOptions(job="digits", best="a_metric_of_the_job", log=("wandb",)))
