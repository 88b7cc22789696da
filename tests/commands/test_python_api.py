"""The Python API: functions of notebooks, scripts without a guard, typed results, and nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import samestep
from command import JOBS, WATCHED
from samestep.launch import fork_client

LINEAR = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def make(width):
    def job(lr: float = 0.1):
        def model():
            torch.manual_seed(0)
            return torch.nn.Linear(width, 1)
        rows = torch.arange(24.0 * width).reshape(24, width) / 100
        loss = lambda output, batch: F.mse_loss(output, batch.targets)
        return Job(model, loss, Recipe(torch.optim.SGD, {"lr": lr}), TensorDataset(rows, rows[:, :1]), 6)
    return job
"""


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_verify_returns_a_verdict_for_each_engine(tmp_path: Path) -> None:
    before = children()
    results = samestep.verify(f"{JOBS}:quick", ["ddp", "dataparallel"], nproc=2, device="cpu", out=tmp_path / "out")
    verdicts = {verdict.engine: verdict for verdict in results.engines}
    assert all(isinstance(verdict, samestep.Verdict) for verdict in results.engines)
    assert (verdicts["ddp"].verdict, verdicts["ddp"].bitwise, verdicts["ddp"].proven) == ("same", True, True)
    assert (verdicts["dataparallel"].verdict, verdicts["dataparallel"].reason) == ("unavailable", "no-op on CPU")
    assert results.same_as_one_process and results.same_as_one_process.same
    assert (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "results.json").exists()
    assert children() == before


def test_functions_that_no_file_holds(tmp_path: Path) -> None:
    """As a notebook has them: made by another one, from values of its own."""
    cells: dict[str, object] = {"__name__": "__main__"}
    exec(LINEAR, cells)
    job = cells["make"](3)  # type: ignore[operator]
    results = samestep.verify(job, "ddp", nproc=2, settings={"lr": 0.2}, out=tmp_path / "out")
    assert [verdict.verdict for verdict in results.engines] == ["same"]
    assert results.settings == {"lr": "0.2"}
    lambda_job = lambda: cells["make"](2)()  # type: ignore[operator]  # noqa: E731
    assert samestep.verify(lambda_job, "single", nproc=1, out=tmp_path / "lambda").engines[0].verdict == "same"


def test_a_function_that_cannot_travel_is_one_sentence(tmp_path: Path) -> None:
    lock = threading.Lock()  # what no other process can be given

    def job() -> object:
        return lock

    with pytest.raises(samestep.UserError, match="the job cannot be pickled for other processes"):
        samestep.verify(job, "single", nproc=1, out=tmp_path / "out")


def test_mistakes_and_failures_are_raised(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match="there is no engine 'dpp'; did you mean 'ddp'"):
        samestep.verify("digits", "dpp")
    with pytest.raises(samestep.UserError, match="raised while it was built"):
        samestep.verify(f"{JOBS}:raises_when_built", "ddp", out=tmp_path / "a")
    with pytest.raises(samestep.TrainingFailed, match="rank 1 failed: RuntimeError: the data of step 3 is bad"):
        samestep.run(f"{JOBS}:raises_on_rank_1", "ddp", nproc=2, launcher="fork", out=tmp_path / "b")


def test_a_training_and_its_evaluation(tmp_path: Path) -> None:
    trained = samestep.run(f"{WATCHED}:job", nproc=2, launcher="fork", best="loss", out=tmp_path / "run")
    assert trained and trained.evaluation and trained.weights_of_step
    scored = samestep.evaluate(trained.weights, f"{WATCHED}:job", nproc=1, launcher="fork", out=tmp_path / "score")
    assert scored and scored.evaluation["loss"] == pytest.approx(trained.evaluation["loss"], rel=1e-6)


def test_a_script_needs_no_guard_and_leaves_nothing(tmp_path: Path) -> None:
    """Also with servers of its own, which end with the call."""
    calls = "import samestep; results = samestep.verify(make(2), 'ddp', nproc=2); print(results.engines[0].verdict)"
    left = "import psutil; print(psutil.Process().children(recursive=True))"
    (tmp_path / "script.py").write_text(f"{LINEAR}\n{calls}\n{left}\n")
    fresh = {name: value for name, value in os.environ.items() if name != fork_client.SOCKETS}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=fresh, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "[]"]
