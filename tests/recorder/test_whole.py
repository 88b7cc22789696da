"""The recorder over a whole training in one process: two models, a closure, a scaler, two clippings, buffers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from budget import budget
from samestep.records.files import from_json
from samestep.records.record import Record
from samestep.records.script import ScriptRecord, of_kind

# Its hooks stay in torch, so that it runs in a process of its own.
TRAINING = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from samestep.recorder.recorder import Recorder
from samestep.records.files import as_json
from samestep.records.script_plan import ScriptPlan
from samestep.world import World

recorder = Recorder(ScriptPlan(sys.argv[1], 0.0, "train.py", steps=99), World.from_env({}), lambda _: None)
recorder.attach()
torch.manual_seed(0)
one = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Linear(3, 1))
one[2].bias.requires_grad_(False)
other = nn.Sequential(nn.Linear(2, 3))
sgd = torch.optim.SGD(one.parameters(), 0.1)
lbfgs = torch.optim.LBFGS(other.parameters(), 0.1, max_iter=3)
schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (sgd, lbfgs)]
x = torch.randn(4, 2)

# Step 0: two losses in one backward pass, two micro-batches, clipped in two parts.
for _ in range(2):
    torch.autograd.backward(one(x).pow(2).mean() / 4 + one(x).pow(2).mean() / 4)
nn.utils.clip_grad_norm_(one[0].parameters(), 1e-3)
nn.utils.clip_grad_norm_(one[1:].parameters(), 1e-3)
sgd.step()
schedules[0].step()
sgd.zero_grad()

# Step 1: the other model's, whose closure is called again and again.
def closure():
    lbfgs.zero_grad()
    loss = other(x).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
    return loss
lbfgs.step(closure)

# Step 2: with a scaler; the gradients of the other model still lie there.
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(one(x).pow(2).sum()).backward()
scaler.unscale_(sgd)
scaler.step(sgd)
print(json.dumps(as_json(recorder.record("itself"))))
"""


@cache
def _trained(folder: str) -> ScriptRecord:

    line = [sys.executable, "-c", TRAINING, folder]
    done = subprocess.run(line, capture_output=True, text=True, timeout=budget(), check=False)
    assert done.returncode == 0, done.stderr
    return from_json(ScriptRecord, json.loads(done.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def seen(folder: Path) -> ScriptRecord:
    return _trained(str(folder))


ONE = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
OTHER = ["Sequential 2: 0.weight", "Sequential 2: 0.bias"]


def test_both_models_are_named_apart_with_their_first_weights(seen: ScriptRecord) -> None:
    assert {*seen.start} == {*ONE, "2.bias (frozen)", *OTHER}
    assert seen.start["0.weight"] != seen.start[OTHER[0]]
    assert seen.start["0.weight"] != seen.steps[0].weights["0.weight"]
    assert {*seen.buffers} == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


def test_each_step_is_of_its_optimizer_its_schedule_and_its_parameters(seen: ScriptRecord, folder: Path) -> None:
    assert [step.optimizer for step in seen.steps] == [0, 1, 0]
    assert [step.schedules for step in seen.steps] == [[0], [0], [1]]
    assert [[round(rate, 9) for rate in step.rates] for step in seen.steps] == [[0.1], [0.1], [0.01]]
    assert [sorted(step.moved) for step in seen.steps] == [sorted(ONE), sorted(OTHER), sorted(ONE)]
    taken = [of_kind(Record(folder).arrays(f"step{number}"), "taken {}") for number in range(3)]
    assert [sorted(each) for each in taken] == [sorted(ONE), sorted(OTHER), sorted(ONE)]


def test_micro_batches_losses_and_clips(seen: ScriptRecord, folder: Path) -> None:
    first = seen.steps[0]
    assert [[(loss.weight, loss.count) for loss in micro.losses] for micro in first.micro_batches] == [
        [(0.25, 4)] * 2
    ] * 2
    assert [len(micro.rows) for micro in first.micro_batches] == [8, 8]  # of two forward passes
    assert [(clip.after, clip.parameters, clip.with_gradient, clip.limit) for clip in first.clips] == [
        (2, 2, 5, 0.001),
        (2, 3, 5, 0.001),
    ]
    arrays = Record(folder).arrays("step0")
    whole = {name: arrays[f"local 0 {name}"] + arrays[f"local 1 {name}"] for name in ONE}
    for name, array in of_kind(arrays, "unclipped {}").items():  # as it was before the first of the two
        np.testing.assert_allclose(array, whole[name], rtol=1e-4, atol=1e-7)
    assert np.linalg.norm(arrays["taken 2.weight"]) <= 0.00101


def test_a_closure_that_is_called_again_clears_nothing_that_was_taken(seen: ScriptRecord, folder: Path) -> None:
    assert seen.steps[1].cleared == 0 and len(seen.steps[1].micro_batches) == 1
    assert [(clip.parameters, clip.with_gradient) for clip in seen.steps[1].clips] == [(2, 2)]
    assert [step.calls for step in seen.steps] == [0, 3, 0]
    arrays = Record(folder).arrays("step1")
    for name in OTHER:  # of the last call
        np.testing.assert_allclose(arrays[f"unclipped {name}"], arrays[f"local 0 {name}"], rtol=1e-5, atol=1e-8)
    taken = np.concatenate([arrays[f"taken {name}"] for name in OTHER])
    assert abs(np.linalg.norm(taken) - 0.001) < 1e-5


def test_a_scaler_is_told(seen: ScriptRecord) -> None:
    assert [step.scale for step in seen.steps] == [None, None, 8.0]
    assert len(seen.steps) == 3 and seen.ended == "itself"
