"""A checkpoint of other data is refused with both values, and the line that is printed goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import samestep
from said import refuses
from samestep.message import Message, message
from samestep.rank.checkpoints import Checkpoints, Difference, TrainingIdentity
from samestep.world import World

IDENTITY = TrainingIdentity(
    data={"training rows": "1600", "evaluation rows": "200", "steps an epoch": "25"},
    rows={"training": {"0": "aa 1 1", "1599": "bb 1 1"}, "evaluation": {"0": "cc 1 1"}},
    values={"global_batch": "64", "optimizer": "SGD(lr=0.1)"},
    versions={"torch": "2.13"},
)
OTHER_DATA: dict[str, tuple[dict[str, Any], Difference]] = {
    "rows": ({"data": IDENTITY.data | {"training rows": "1664"}}, Difference("training rows", "1664", "1600")),
    "evaluation rows": ({"data": IDENTITY.data | {"evaluation rows": "9"}}, Difference("evaluation rows", "9", "200")),
    "values of a row": (
        {"rows": {"training": {"0": "aa 1 1", "1599": "b2 1 1"}}},
        Difference("training row 1599", "b2 1 1", "bb 1 1"),
    ),
}


def checkpoints(folder: Path, identity: TrainingIdentity, **more: Any) -> Checkpoints:
    return Checkpoints(folder, World(), None, identity=identity, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint of the training."""
    written = checkpoints(tmp_path, IDENTITY)
    written.take(7, {"identity": IDENTITY.tree()})
    written.close()
    return tmp_path


@pytest.mark.parametrize("name", OTHER_DATA)
@pytest.mark.parametrize("resume", ["auto", "named"])
def test_other_data_are_refused_and_the_option_goes_on(name: str, resume: str, folder: Path) -> None:
    changed, difference = OTHER_DATA[name]
    other = replace(IDENTITY, **changed)
    resume = str(folder / "step-7") if resume == "named" else resume
    with refuses("checkpoint_of_other_data", differences=[difference.said]):
        checkpoints(folder, other, resume=resume).load()
    goes_on = checkpoints(folder, other, resume=resume, changed_data=True)
    assert goes_on.load() and goes_on.identity
    assert goes_on.identity.changes == (f"since step 7: {difference.text}",)
    assert goes_on.other_evaluation == (name == "evaluation rows")
    again = checkpoints(folder, replace(goes_on.identity, changes=()), changed_data=True)  # what it was trained on now
    goes_on.take(9, {"identity": goes_on.identity.tree()})
    goes_on.close()
    assert again.load() and again.identity and again.identity.changes == goes_on.identity.changes


def test_other_values_are_another_training_unless_it_is_named(folder: Path) -> None:
    other = replace(IDENTITY, values=IDENTITY.values | {"optimizer": "SGD(lr=0.2)"})
    difference = Difference("optimizer", "SGD(lr=0.2)", "SGD(lr=0.1)")
    with refuses("checkpoint_of_another_training", difference=difference.said):
        checkpoints(folder, other).load()
    assert checkpoints(folder, other, resume=str(folder / "step-7")).load()


def test_the_same_data_go_on_also_with_fewer_rows_read_and_other_versions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = {"training": {"0": "aa 1.0000001 1"}, "evaluation": {"7": "dd 1 1"}}  # and rounded otherwise
    here = replace(IDENTITY, rows=fewer, versions={"torch": "2.14"}, changing={"training": 3})
    said: list[Message] = []
    monkeypatch.setattr("samestep.rank.checkpoints.say", said.append)
    assert checkpoints(folder, here).load()
    assert message("checkpoint_differs", difference=Difference("torch", "2.14", "2.13").said) in said
    assert message("rows_change_each_time", count=3, dataset="training") in said


JOB = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def job():
    rows = torch.arange(float(os.environ["ROWS"]))[:, None]
    model = lambda: (torch.manual_seed(0), nn.Linear(1, 1))[1]
    sgd = Recipe(torch.optim.SGD, {"lr": 1e-9})
    return Job(model, lambda output, batch: output.mean(), sgd, TensorDataset(rows, rows), global_batch=4, epochs=2)
"""


def test_a_job_whose_data_have_grown(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    line = ["run", f"{tmp_path}/job.py", "--engine", "single", "--nproc", "1", "--checkpoint-every", "5steps"]

    def run(rows: int, *more: str) -> tuple[int, str]:
        done = samestep(*line, *more, out=tmp_path / "out", env={"ROWS": str(rows)})
        return done.returncode, done.stderr

    code, said = run(16)
    assert code == 0, said
    for name in ("results.json", "weights.safetensors"):  # as if it had been killed after its checkpoint of step 5
        (tmp_path / "out" / name).unlink()
    code, said = run(18)
    assert code == 2 and "training rows: 16" in said
    assert run(18, "--resume-changed-data")[0] == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["resumed_from"] == 5 and results["changes"][0].startswith("since step 5")
