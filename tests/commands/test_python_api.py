"""The Python API: functions of notebooks, scripts without a guard, typed results, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import samestep
from budget import budget
from command import JOBS, WATCHED
from full_disk import fill
from samestep.commands import api
from samestep.launch import fork_client
from samestep.launch.end import live_local_ranks, local_pids

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
    assert (verdicts["dataparallel"].verdict, str(verdicts["dataparallel"].reason)) == ("unavailable", "no-op on CPU")
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
    make: Any = cells["make"]  # not the cells themselves: they hold Python's builtins, which cannot all be pickled
    lambda_job = lambda: make(2)()  # noqa: E731
    assert samestep.verify(lambda_job, "single", nproc=1, out=tmp_path / "lambda").engines[0].verdict == "same"


def test_a_function_that_cannot_travel_is_one_sentence(tmp_path: Path) -> None:
    lock = threading.Lock()  # what no other process can be given

    def job() -> object:
        return lock

    with pytest.raises(samestep.UserError, match="cannot be pickled"):
        samestep.verify(job, "single", nproc=1, out=tmp_path / "out")


def test_collectives_are_measured(tmp_path: Path) -> None:
    sizes = {"op": "all_reduce", "sizes": "4KiB", "dtype": "float32", "seconds": 0.05}
    results = samestep.collectives(nproc=2, launcher="fork", out=tmp_path / "out", **sizes)
    assert results and not results.wrong and results.checked > 0
    assert results.curve("all_reduce").seconds(4096) > 0
    with pytest.raises(samestep.UserError, match="al_reduce"):
        samestep.collectives(op="al_reduce", nproc=2)


def test_mistakes_and_failures_are_raised(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match="no engine 'dpp'"):
        samestep.verify("digits", "dpp")
    with pytest.raises(samestep.UserError, match="it was built"):
        samestep.verify(f"{JOBS}:raises_when_built", "ddp", out=tmp_path / "a")
    with pytest.raises(samestep.TrainingFailed, match="rank 1 failed"):
        samestep.run(f"{JOBS}:raises_on_rank_1", "ddp", nproc=2, launcher="fork", out=tmp_path / "b")
    assert local_pids(tmp_path / "b") and not live_local_ranks(tmp_path / "b")


def test_a_training_and_its_evaluation(tmp_path: Path) -> None:
    """Paths are texts here; the first training's folder is not trained into again."""
    job, out = f"{WATCHED}:job", str(tmp_path / "run")
    trained = samestep.run(job, nproc=2, launcher="fork", best="loss", log="csv", out=out)
    assert trained and trained.evaluation and trained.weights_of_step
    assert [*Path(out).glob("*.csv")]
    predictions = str(tmp_path / "out.npy")
    scored = samestep.evaluate(trained.weights, job, nproc=1, launcher="fork", out=out + "2", predictions=predictions)
    assert scored and scored.evaluation["loss"] == pytest.approx(trained.evaluation["loss"], rel=1e-6)
    assert scored.predictions == predictions and Path(predictions).exists()
    assert samestep.run(job, nproc=2, launcher="fork", best="loss", out=out) == trained  # it has finished already
    with pytest.raises(samestep.UserError, match=r"weights\.safetensors exists"):
        samestep.run(job, nproc=2, launcher="fork", best="loss", out=out, resume="never")
    again = samestep.run(job, nproc=1, launcher="fork", init=trained.weights, out=out + "3")
    assert again and again.init and again.init.file == trained.weights


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "steps": (lambda: samestep.verify(steps=3), "steps=3: give 4 or more"),
    "rounds": (lambda: samestep.compare(rounds=0), "rounds=0: give 1 or more"),
    "measured steps": (lambda: samestep.compare(measured_steps=1), "measured_steps=1: give 2 or more"),
    "warm-up": (lambda: samestep.compare(warmup_steps=0), "warmup_steps=0: give 1 or more"),
    "patience": (lambda: samestep.run(best="loss", patience=0), "patience=0: give 1 or more"),
    "evaluations": (lambda: samestep.run(evaluate_every=-1), "evaluate_every=-1: give 0 or more"),
    "a deadline": (lambda: samestep.evaluate("w", deadline_s=0), "deadline_s=0: give 1 or more"),
    "a deadline that is no number": (lambda: samestep.verify(deadline_s=float("nan")), "deadline_s=nan: give 1 or"),
    "ranks": (lambda: samestep.verify(nproc=2.0), "nproc=2.0: give a whole number or None"),  # type: ignore[arg-type]
    "a port": (lambda: samestep.MachineOptions(port=65536), "port=65536: give 65535 or less"),
    "a device": (lambda: samestep.verify(device="tpu"), "there is no device 'tpu' here"),
    "a job": (lambda: samestep.verify(3), "job=3: give a function that returns a Job, the path"),  # type: ignore[arg-type]
    "settings": (lambda: samestep.verify(settings=["lr=1"]), "settings=['lr=1']: give a mapping"),  # type: ignore[arg-type]
    "engines": (lambda: samestep.verify(engines=[1]), "engines=[1]: give the name of an engine"),  # type: ignore[list-item]
    "engines without a name": (lambda: samestep.verify(engines=","), "--engines ',' names none"),
    "two engines": (lambda: samestep.run(engine="ddp,fsdp"), "a training has one engine"),
    "a log": (lambda: samestep.run(log="csvv"), "--log csvv: did you mean 'csv'?"),
    "logs": (lambda: samestep.run(log=3), "log=3: give the name of a log, or a list of names"),  # type: ignore[arg-type]
    "a machine": (lambda: samestep.MachineOptions(hosts="-h"), "--hosts '-h': this is not a machine's name"),
    "a folder of runs": (lambda: samestep.runs(3), "folder=3: give the path of a folder"),  # type: ignore[arg-type]
    "a folder that is a file": (lambda: samestep.verify(out=__file__), "test_python_api.py is a file; give a folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_sentence(name: str) -> None:
    call, sentence = WRONG[name]
    with pytest.raises(samestep.UserError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_an_argument_that_no_function_has() -> None:
    with pytest.raises(TypeError, match="nprocs"):
        samestep.verify(nprocs=2)  # type: ignore[call-arg]


def test_calls_of_several_threads_take_turns(tmp_path: Path) -> None:
    """None of them is the main thread, which alone may handle signals."""
    handler, trained, began = signal.getsignal(signal.SIGUSR1), [], threading.Event()

    class Seen(str):
        def __str__(self) -> str:
            if sys._getframe(1).f_code is api._target.__wrapped__.__code__:  # in the call, not while it is checked
                began.set()
            return f"{JOBS}:quick"

    def train(name: str) -> None:
        trained.append(samestep.run(Seen(), "single", nproc=1, launcher="fork", out=tmp_path / name))

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in "ab"]
    with api._call("digits"):
        for thread in threads:
            thread.start()
        assert not began.wait(0.5)
    for thread in threads:
        thread.join(budget())
    assert [each.steps for each in trained if each] == [8, 8]
    assert samestep.run(f"{JOBS}:quick", "single", nproc=1, launcher="fork", out=tmp_path / "main")
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    def verify() -> object:
        return samestep.verify(f"{JOBS}:quick", "single", nproc=1, out=tmp_path / "out")

    verify()
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, "results.json")
        with pytest.raises(samestep.UserError, match=r"out/results\.json cannot be"):
            verify()
    verify()


@pytest.mark.check
def test_a_script_needs_no_guard_and_leaves_nothing(tmp_path: Path) -> None:
    """Also with servers of its own, which end with the call."""
    calls = "import samestep; results = samestep.verify(make(2), 'ddp', nproc=2); print(results.engines[0].verdict)"
    left = "import psutil; print(psutil.Process().children(recursive=True))"
    (tmp_path / "script.py").write_text(f"{LINEAR}\n{calls}\n{left}\n")
    fresh = {name: value for name, value in os.environ.items() if name != fork_client.SOCKETS}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=fresh, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "[]"]
