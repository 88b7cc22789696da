"""Bad input: one sentence that names what was wrong and what to do, exit 2, and never a traceback."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from budget import deadline
from command import JOBS, samestep
from ranks import SOURCE
from said import refuses

CASES = {
    "unknown engine": (["verify", "--engines", "dpp"], "there is no engine 'dpp'; did you mean 'ddp'?"),
    "unknown job": (["verify", "digit"], "there is no job 'digit'; did you mean 'digits'?"),
    "unknown launcher": (["verify", "--launchers", "slurmm"], "there is no launcher 'slurmm'"),
    "no such job file": (["verify", "nowhere.py"], "there is no job file nowhere.py"),
    "no such function": (["verify", f"{JOBS}:quik"], "has no function 'quik'; did you mean 'quick'?"),
    "a setting of every job": (["verify", "--set", "max_step=3"], "no setting 'max_step'; did you mean 'max_steps'?"),
    "no such setting": (["verify", "--set", "learning_rate=1"], "the job digits has no setting 'learning_rate'"),
    "setting of the wrong type": (["verify", "--set", "lr=fast"], "--set lr=fast: 'lr' takes float, not 'fast'"),
    "setting without a value": (["verify", "--set", "lr"], "--set lr: write it as key=value"),
    "setting that the job needs": (["verify", f"{JOBS}:needs_data"], "needs a value for 'data': give --set data="),
    "nproc 0": (["verify", "--nproc", "0"], "--nproc 0: at least one rank must train"),
    "global batch 0": (["verify", "--set", "global_batch=0"], "global_batch is 0; it must be above 0"),
    "workers below 0": (["verify", "--set", "workers=-1"], "workers is -1; it must be a whole number, 0 or above"),
    "workers without number": (["verify", "--set", "workers=100000"], "workers is 100000; this machine has"),
    "a rate of no number": (["verify", "--set", "lr=nan"], "--set lr=nan: give 'lr' a finite number"),
    "a rate without end": (["verify", "--set", "lr=-inf"], "--set lr=-inf: give 'lr' a finite number"),
    "a setting twice": (["verify", "--set", "lr=1", "--set", "lr=2"], "--set gives lr twice, 1 and 2; leave out one"),
    "a class that the model has not": (
        ["verify", "--engines", "fsdp", "--set-engine", "fsdp.wrap=Nope"],
        "--set-engine fsdp.wrap=Nope: the model has no module of this class; name one of",
    ),
    "no CUDA device": (["verify", "--device", "cuda"], "--device cuda: this machine shows no CUDA device"),
    "no such device": (["verify", "--device", "tpu:0"], "there is no device 'tpu:0' here"),
    "job that raises": (["verify", f"{JOBS}:raises_when_built"], "raised while it was built: line"),
    "job that is none": (["verify", f"{JOBS}:returns_a_model"], "returned Linear, not a samestep.Job"),
    "model without parameters": (["verify", f"{JOBS}:no_parameters"], "has no parameters to train"),
    "loss that is not a scalar": (["verify", f"{JOBS}:not_a_scalar"], "returned a tensor of shape [4], not a scalar"),
    "unseeded model": (["verify", f"{JOBS}:unseeded"], "differs from call to call"),
    "one row for BatchNorm": (
        ["run", f"{JOBS}:one_row", "--engine", "single", "--nproc", "1"],
        "step 2: rank 0 gets 1 row, BatchNorm needs 2; set global_batch=… so that every rank gets more, or last=drop",
    ),
    "loss not finite": (
        ["run", f"{JOBS}:becomes_nan", "--engine", "single", "--nproc", "1"],
        "the loss is not finite at step 37 on rank 0: nan",
    ),
    "an engine of another library": (
        ["verify", "--engines", "apex"],
        "there is no engine 'apex'; here 'amp' does that",
    ),
    "no such engine setting": (
        ["verify", "--engine", "ddp", "--set-engine", "compres=fp16"],
        "--set-engine compres: none of the engines asked for has this setting; did you mean 'ddp.compress'?",
    ),
    "engine setting of the wrong type": (
        ["verify", "--engine", "ddp", "--set-engine", "compress=zip"],
        "--set-engine compress=zip: 'compress' takes none or fp16 or bf16 or powersgd, not 'zip'",
    ),
    "no engine to run": (["run", "--engine", " "], "--engine ' ' names none"),
    "two engines to run": (["run", "--engine", "ddp,fsdp"], "--engine 'ddp,fsdp': a training has one engine; name one"),
    "two launchers": (["run", "--launcher", "all"], "--launcher 'all': one launcher starts the ranks; name one"),
    "no word for engines": (
        ["verify", "digits", "--engines", ""],
        "--engines '' names none",
    ),
    "no word for a mesh": (["run", "digits", "--mesh="], "--mesh '' names none"),
    "no word for a setting": (["run", "digits", "--set", ""], "--set '' names none"),
    "a comma without a name": (
        ["verify", "digits", "--engines", "ddp,,fsdp"],
        "--engines 'ddp,,fsdp' has a comma",
    ),
    "a comma at the end": (["verify", "digits", "--engines", "ddp,"], "--engines 'ddp,' has a comma with no name"),
    "no engine to verify": (["verify", "--engines", " , "], "--engines ' , ' names none; name one, or leave it out"),
    "a bucket of no number": (
        ["verify", "--engine", "ddp", "--set-engine", "bucket_mb=nan"],
        "--set-engine bucket_mb=nan: give 'bucket_mb' a finite number",
    ),
    "a bucket below nothing": (
        ["verify", "--engine", "ddp", "--set-engine", "bucket_mb=-5"],
        "--set-engine bucket_mb=-5: it must be above 0",
    ),
    "an empty bucket": (
        ["verify", "--engine", "ddp", "--set-engine", "bucket_mb=0"],
        "--set-engine bucket_mb=0: it must be above 0",
    ),
    "spot checks of a library's loop": (
        ["run", "--engine", "accelerate", "--spot-check", "every=9"],
        "--spot-check: the steps of this engine are not replayed: its library was not tried so; leave it out, or",
    ),
    "spot checks of inexact gradients": (
        ["run", "--engine", "ddp", "--set-engine", "compress=fp16", "--spot-check", "every=9"],
        "--spot-check: the steps of this engine are not replayed: compress=fp16 is inexact on purpose; leave it out",
    ),
    "a host that is an option": (["run", "--hosts", "h1,-oProxyCommand=x"], "--hosts '-oProxyCommand=x': this is no"),
    "launcher that starts no engine asked for": (
        ["verify", "--engine", "single", "--launcher", "spawn"],
        "--launchers spawn starts none of these engines: single starts with process",
    ),
    "engine that cannot run here": (
        ["run", "--engine", "dataparallel", "--device", "cpu"],
        "the engine dataparallel cannot run here: no-op on CPU",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_and_exit_2(case: str, tmp_path: Path) -> None:
    arguments, sentence = CASES[case]
    done = samestep(*arguments, out=tmp_path / "out")
    assert sentence in done.stderr
    assert done.returncode == 2, done.stderr
    events = f"samestep: {arguments[1]} on "  # of a training that had begun
    said = [line for line in done.stderr.strip().splitlines() if not line.startswith(events)]
    assert len([line for line in said if not line.endswith("samples a step")]) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [("import no_such_package\ndef job(): ...", "line 1: ModuleNotFoundError"), ("def job(:", "line 1: SyntaxError")],
)
def test_job_file_that_does_not_import(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "my_job.py"
    file.write_text(content)
    done = samestep("verify", str(file), out=tmp_path / "out")
    assert done.returncode == 2
    assert "not import" in done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_never_gets_built_ends_at_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "my_job.py"
    file.write_text("import time\ndef job(): time.sleep(1e6)\n")
    done = samestep("verify", str(file), "--engine", "ddp", "--deadline", "2", out=tmp_path / "out")
    assert done.returncode == 1
    assert str(file) in done.stderr and "my_job.py:2, job (asleep)" in done.stderr


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    done = samestep("verify", out=tmp_path / "out" / "here")
    assert done.returncode == 2
    assert "is not writable" in done.stderr
    assert (tmp_path / "out").read_text() == "mine"


def test_folder_that_holds_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = samestep("verify", out=tmp_path)
    assert done.returncode == 2
    assert "not samestep's" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_port_taken(launcher: str, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        arguments = ["run", f"{JOBS}:quick", "--engine", "ddp", "--launcher", launcher, "--port", port]
        done = samestep(*arguments, out=tmp_path / "out")
    assert done.returncode == 2
    assert f"port {port}" in done.stderr and f"process {os.getpid()}" in done.stderr


@pytest.mark.check
def test_a_port_that_is_free_is_used(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = samestep("run", f"{JOBS}:quick", "--launcher", "spawn", "--port", port, *deadline(), out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    # In new interpreters, which must not end as Python's do: see NORMAL_EXIT of the job's file.
    assert "interpreter's exit" not in "".join(log.read_text() for log in (tmp_path / "out").glob("rank*.log"))


def test_a_file_that_hides_a_module_of_pythons_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("import numbers_of_mine\n")
    (tmp_path / "data.py").touch()
    done = samestep("--help", env={"PYTHONPATH": f"{SOURCE}:{tmp_path}"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path}/random.py is imported" in done.stderr
    assert "rename it" in done.stderr


def test_more_ranks_than_cores_only_warns(tmp_path: Path) -> None:
    ranks = (os.cpu_count() or 1) + 1
    done = samestep("run", f"{JOBS}:quick", "--nproc", str(ranks), *deadline(), "--device", "cpu", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks share {ranks - 1} cores" in done.stderr


def test_more_ranks_than_gpus() -> None:
    """The rule itself, on the facts that a machine with one GPU reports."""
    from samestep.commands.inspected_setup import check_devices
    from samestep.records.inspection import EngineFacts, Inspection, MachineFacts

    engines = (EngineFacts("ddp", True, process_kind="group"), EngineFacts("single", True, process_kind="one"))
    found = Inspection(("cuda:0",), MachineFacts("3.11", "2.13", "h1", "x86_64", 2), 1, engines)
    with refuses("too_few_gpus", flag="--nproc", ranks=2, gpus=1):
        check_devices(2, found, ("ddp",))
    check_devices(2, found, ("ddp",), as_threads=True)
    check_devices(1, found, ("ddp",))
    check_devices(2, found, ("single",))
    check_devices(2, replace(found, devices=("cpu",)), ("ddp",))
