"""What the folder of results is recognised by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.commands import results_folder
from samestep.commands.machine_options import MachineOptions
from samestep.commands.setup import Setup
from samestep.errors import UserError
from samestep.launch import Machines
from samestep.records.files import OLDEST, SCHEMA
from samestep.records.runs import ResultsIdentity

SETUP = Setup("digits", {"lr": "0.1"}, ("ddp",), {"wrap": "root"}, ("spawn",), rounds=2, machines=MachineOptions())


@pytest.fixture(autouse=True)
def unlocked() -> Iterator[None]:
    yield
    results_folder.release_folders()


def study(setup: Setup, **other: Any) -> Any:
    """A study without its inspection, of which the folder needs three values."""
    facts = {"nproc": 2, "nnodes": 1, "source": "a1", "steps": 8, "torch": "2.13", **other}
    return SimpleNamespace(
        setup=setup,
        nproc=facts["nproc"],
        machines=Machines(facts["nnodes"], single_launch=True),
        job=SimpleNamespace(source=facts["source"], proof=SimpleNamespace(steps=facts["steps"], second=None)),
        inspection=SimpleNamespace(machine=SimpleNamespace(torch=facts["torch"])),
    )


def open_again(out: Path, setup: Setup, command: str = "compare", **other: Any) -> None:
    results_folder.release_folders()
    training = other.pop("training", "")
    results_folder.results_folder(command, study(replace(setup, out=out), **other), training=training)


def test_the_same_study_is_resumed(tmp_path: Path) -> None:
    open_again(tmp_path / "out", SETUP)
    open_again(tmp_path / "out", replace(SETUP, deadline_s=5.0))  # which decides no result


def test_no_folder_of_a_rank_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "rank-0").symlink_to(tmp_path / "precious")
    rank: Any = SimpleNamespace(rank=0)
    with pytest.raises(UserError, match="is a link"):
        results_folder.launch_folder(tmp_path, study(SETUP), rank)
    (tmp_path / "rank-0").unlink()
    assert results_folder.launch_folder(tmp_path, study(SETUP), rank).is_dir()


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "job": "my_job.py",
        "settings": {"lr": "0.2"},
        "engines": ("fsdp",),
        "engine_settings": {"wrap": "auto"},
        "launchers": ("torchrun",),
        "device": "cuda",
        "rounds": 3,
        "warmup_steps": 21,
        "measured_steps": 101,
    }.items(),
)
def test_other_options_are_another_study(name: str, value: Any, tmp_path: Path) -> None:
    open_again(tmp_path / "out", SETUP)
    with pytest.raises(UserError, match=f"holds other results: {name} was "):
        open_again(tmp_path / "out", replace(SETUP, **{name: value}))


@pytest.mark.parametrize(
    ("name", "other"),
    {
        "command": {"command": "verify"},
        "file": {"source": "b2"},
        "torch": {"torch": "2.14"},
        "nproc": {"nproc": 3},
        "nnodes": {"nnodes": 2},
        "steps": {"steps": 4},
        "training": {"training": "--init c3"},
    }.items(),
)
def test_other_facts_are_another_study(name: str, other: dict[str, Any], tmp_path: Path) -> None:
    open_again(tmp_path / "out", SETUP)
    with pytest.raises(UserError, match=f"holds other results: {name} was "):
        open_again(tmp_path / "out", SETUP, **other)


def test_every_option_is_compared_or_named_as_one_that_is_not() -> None:
    recorded, options = ({field.name for field in fields(kind)} for kind in (ResultsIdentity, Setup))
    assert options - results_folder.NOT_COPIED <= recorded
    of_machines = {field.name for field in fields(MachineOptions)}
    rendezvous = {"node_rank", "master_addr", "port", "hosts", "interface", "max_restarts", "timeout_s"}
    assert of_machines - rendezvous == {"nnodes", "threads"}  # both are in a ResultsIdentity


@pytest.mark.parametrize(("schema", "age"), [(OLDEST - 1, "an older"), (SCHEMA + 1, "a newer"), (None, "an older")])
def test_a_study_of_another_samestep_is_refused_in_one_sentence(schema: int | None, age: str, tmp_path: Path) -> None:
    open_again(tmp_path / "out", SETUP)
    path = tmp_path / "out" / "study.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    says = rf"study.json was written by {age} samestep \(schema {schema}, this one has {SCHEMA}\); give another folder"
    with pytest.raises(UserError, match=says):
        open_again(tmp_path / "out", SETUP)


def test_a_study_that_is_cut_off_is_refused_in_one_sentence(tmp_path: Path) -> None:
    open_again(tmp_path / "out", SETUP)
    (tmp_path / "out" / "study.json").write_text('{"schema"')
    with pytest.raises(UserError, match=r"study.json cannot be"):
        open_again(tmp_path / "out", SETUP)


def test_other_threads_are_another_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    open_again(tmp_path / "out", SETUP)
    with pytest.raises(UserError, match="threads was 0"):
        open_again(tmp_path / "out", replace(SETUP, machines=MachineOptions(threads=1)))


def test_the_packages_digest_is_of_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commands").mkdir()
    monkeypatch.setattr(results_folder, "__file__", str(tmp_path / "commands" / "results_folder.py"))
    found = {results_folder.package_digest()}
    for changed in ("commands/results_folder.py", "engine.py"):
        (tmp_path / changed).write_text("x = 1\n")
        found.add(results_folder.package_digest())
    (tmp_path / "engine.py").write_text("x = 2\n")
    assert len(found | {results_folder.package_digest()}) == 4
