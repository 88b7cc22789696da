"""The commands and their JSON: what scripts build on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version as package_version
from pathlib import Path

import pytest

from budget import budget, deadline, wait_until
from command import DIGITS, JOBS, TESTS, samestep
from samestep.records.files import SCHEMA

ROW = {
    "engine",
    "launcher",
    "verdict",
    "bitwise",
    "replicas",
    "max_difference",
    "bound",
    "first_divergence",
    "reason",
}


def test_engines() -> None:
    done = samestep("engines", "--device", "cpu", "--json")
    listed = json.loads(done.stdout)
    assert listed["schema"] == SCHEMA
    rows = {row["name"]: row for row in listed["engines"]}
    assert {"dataparallel", "ddp", "single", "fsdp", "zero", "amp", "horovod", "lightning"} < set(rows)
    assert all({"name", "available", "reason", "install", "version"} <= set(row) for row in rows.values())
    assert rows["ddp"]["available"]
    assert rows["dataparallel"]["reason"]["english"] == "no-op on CPU"
    assert "no-op on CPU" in samestep("engines", "--device", "cpu").stdout


def test_verify(tmp_path: Path) -> None:
    arguments = ["verify", *DIGITS, "--engines", "single,ddp,dataparallel", "--nproc", "2", "--device", "cpu"]
    done = samestep(*arguments, "--also", "5", "--json", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["job"], found["world_size"]) == ("digits", 2)
    rows = {row["engine"]: row for row in found["engines"]}
    assert all(set(row) >= ROW for row in rows.values())
    assert (rows["ddp"]["verdict"], rows["ddp"]["bitwise"], rows["ddp"]["replicas"]) == ("same", True, 2)
    second = rows["ddp"]["second"]
    assert [second[name] for name in ("ranks", "ranks_as", "verdict")] == [5, "threads", "same"]
    assert rows["single"]["second"] is None
    assert rows["dataparallel"]["verdict"] == "unavailable"
    assert "samples_per_second" not in rows["ddp"]
    assert found["same_as_one_process"]["answer"] == "yes"


@pytest.mark.check
def test_a_quick_proof_says_what_it_leaves_out(tmp_path: Path) -> None:
    done = samestep("verify", "digits", "--engine", "ddp", "--nproc", "2", "--quick", out=tmp_path / "out")
    assert (done.returncode, "--quick" in done.stdout) == (0, True), done.stdout + done.stderr
    (reference,) = (tmp_path / "out").rglob("reference/rank0.json")
    assert {name for layout in json.loads(reference.read_text())["layouts"] for name in layout["trainings"]} == {
        "gradient",
        "sgd",
    }


def test_verify_says_why_n_ranks_are_not_plain_training(tmp_path: Path) -> None:
    jobs = TESTS / "mutations" / "jobs.py"
    done = samestep("verify", f"{jobs}:conv", "--engines", "ddp", "--json", out=tmp_path / "out")
    alike = json.loads(done.stdout)["same_as_one_process"]
    assert alike["answer"] == "no, as expected"
    assert "BatchNorm (1)" in alike["reason"]["english"]
    assert "dropout (3)" in alike["reason"]["english"]


def test_verify_in_float32_where_float64_does_not_fit(tmp_path: Path) -> None:
    done = samestep("verify", f"{JOBS}:float32_only", "--engines", "ddp", "--json", out=tmp_path / "out")
    found = json.loads(done.stdout)
    (row,) = found["engines"]
    assert row["verdict"] == "same"
    assert found["proof"]["dtype"] == "float32"
    assert any("float64 failed: RuntimeError" in note["english"] for note in row["notes"])


def test_verify_refuses_what_a_layer_cannot_do(tmp_path: Path) -> None:
    done = samestep("verify", f"{JOBS}:one_row", "--engines", "ddp", "--json", out=tmp_path / "out")
    (row,) = json.loads(done.stdout)["engines"]
    assert row["verdict"] == "refused"
    assert done.returncode == 1  # nothing was proven
    assert "BatchNorm needs 2" in row["reason"]["english"]


COMPARE = ["compare", *DIGITS, "--engines", "ddp", "--nproc", "2", "--measured-steps", "10", "--device", "cpu"]


@pytest.mark.check
def test_compare_measures_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = samestep(*COMPARE, "--launchers", "fork", "--rounds", "2", "--json", out=out)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["engine"], row["verdict"]) for row in found["engines"]] == [("single", "same"), ("ddp", "same")]
    for row in found["engines"]:
        speed, (low, high) = row["samples_per_second"], sorted(each["samples_per_second"] for each in row["launches"])
        assert speed["n"] == 2
        assert [speed["low"], speed["median"], speed["high"]] == pytest.approx([low, (low + high) / 2, high])
        assert all(len(launched["step_ms"]) == 10 for launched in row["launches"])
        assert row["peak_memory_mib"] > 50
        assert row["monitor"]["samples"] >= 2 and row["monitor"]["seconds"] > 0.1
    assert found["engines"][0]["efficiency"]["median"] == 1.0
    ddp = found["engines"][1]
    assert ddp["efficiency"]["median"] == pytest.approx(ddp["ratio"]["median"] / 2)
    assert Path(found["report"]).resolve() == (out / "report.html").resolve()
    assert "<html" in (out / "report.html").read_text()
    assert json.loads((out / "results.json").read_text()) == found

    # The second round starts with another engine than the first.
    plans = {path.parent.name: json.loads(path.read_text()) for path in out.glob("launches/*/plan.json")}
    order = sorted(plans, key=lambda name: plans[name]["started_at"])
    assert order == ["single-fork-0", "ddp-fork-0", "ddp-fork-1", "single-fork-1"]

    # What is there is not measured again: only the launch that is missing.
    kept = {path: path.stat().st_mtime_ns for path in out.glob("launches/*/rank0.json")}
    lost = out / "launches" / "ddp-fork-1" / "rank0.json"
    lost.unlink()
    again = samestep(*COMPARE, "--launchers", "fork", "--rounds", "2", "--json", out=out)
    assert again.returncode == 0, again.stderr
    assert lost.exists()
    changed = [path for path, written in kept.items() if path.stat().st_mtime_ns != written]
    assert changed == [lost]
    # Verdicts are kept, and not the weights that they were given on.
    verdicts = [
        [{k: row[k] for k in ("verdict", "bitwise", "max_difference", "bound")} for row in each["engines"]]
        for each in (found, json.loads(again.stdout))
    ]
    assert verdicts[0] == verdicts[1]
    assert list(out.glob("reference/*.npz")) and not list(out.glob("launches/*/*.npz"))

    # Nor what other code has measured.
    asked = json.loads((out / "study.json").read_text())
    (out / "study.json").write_text(json.dumps(asked | {"package": "another"}))
    other = samestep(*COMPARE, "--launchers", "fork", "--rounds", "2", "--json", out=out)
    assert other.returncode == 2
    assert "package was 'another'" in other.stderr


@pytest.mark.check
def test_compare_starts_every_launcher(tmp_path: Path) -> None:
    done = samestep(*COMPARE, "--launchers", "all", "--rounds", "1", "--json", out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    launchers = [("single", "process"), *(("ddp", name) for name in ("torchrun", "mpirun", "spawn", "srun"))]
    assert [(row["engine"], row["launcher"]) for row in found["engines"]] == launchers
    absent = {row["launcher"]: row["reason"]["english"] for row in found["engines"] if row["verdict"] == "unavailable"}
    assert set(absent) <= ({"srun"} if "CI" in os.environ else {"srun", "mpirun"})
    assert "Slurm job here" in absent["srun"] or "not installed" in absent["srun"]
    assert {row["verdict"] for row in found["engines"] if row["launcher"] not in absent} == {"same"}
    losses = [row["launches"][0]["losses"] for row in found["engines"] if row["launches"]]
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)  # the launcher does not change the training


@pytest.mark.check
def test_compare_does_not_mix_two_questions(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert samestep("verify", f"{JOBS}:quick", "--engines", "single", out=out).returncode == 0
    done = samestep("verify", f"{JOBS}:quick", "--engines", "single", "--steps", "4", out=out)
    assert done.returncode == 2
    assert "steps was 8" in done.stderr
    asked = json.loads((out / "study.json").read_text())
    for key in ("samestep", "package", "torch"):
        (out / "study.json").write_text(json.dumps(asked | {key: "another"}))
        done = samestep("verify", f"{JOBS}:quick", "--engines", "single", out=out)
        assert done.returncode == 2
        assert f"holds other results: {key} was 'another'" in done.stderr


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "samestep",
        "verify",
        f"{JOBS}:slow_until_requeued",
        "--engines",
        "single",
        "--also",
        "none",
    ]
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        try:
            wait_until((out / "reference").exists, "no launch")
            second = samestep(*command[3:], out=out)
            assert second.returncode == 2
            assert "another samestep is" in second.stderr
        finally:
            first.kill()


def test_run_trains_evaluates_and_leaves_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    out = tmp_path / "out"
    arguments = ["run", *DIGITS, "--engine", "ddp", "--nproc", "2", "--set", "epochs=4", "--device", "cpu"]
    done = samestep(*arguments, *deadline(), "--json", out=out)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["evaluation_rows"] == 297
    assert found["evaluation"]["accuracy"] > 0.9
    assert load_file(out / "weights.safetensors")["0.weight"].shape == (16, 1, 3, 3)

    again = samestep(*arguments, out=out)
    assert again.returncode == 0 and "96 steps" in again.stderr
    other = samestep(*arguments[:-3], "epochs=5", *arguments[-2:], out=out)
    assert other.returncode == 2 and "holds other results" in other.stderr


@pytest.mark.parametrize("job", ["tied"])
def test_run_saves_tied_weights(job: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    jobs = TESTS / "mutations" / "jobs.py"
    done = samestep("run", f"{jobs}:{job}", *deadline(), out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    assert (weights["embedding.weight"] == weights["output.weight"]).all()


def test_the_version_is_printed_without_torch_being_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "samestep", "--version"],
        capture_output=True,
        text=True,
        timeout=budget(20),
        check=True,
    )
    assert done.stdout == f"samestep {package_version('samestep')} (torch {package_version('torch')})\n"
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
