"""samestep runs: what became of each past run, and the line that continues or repeats it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer

import samestep as package
from budget import budget
from command import TESTS, samestep
from samestep.commands import cli, options
from samestep.commands.command_options import (
    CollectivesOptions,
    CompareOptions,
    EvaluateOptions,
    RunOptions,
    VerifyOptions,
)
from samestep.commands.machine_options import MachineOptions
from samestep.commands.options import Options
from samestep.commands.progress import show_runs
from samestep.commands.results_folder import prepare, recorded, release_folders, words_of
from samestep.errors import TrainingFailed, UserError
from samestep.message import as_said, message
from samestep.records.files import OLDEST, SCHEMA, from_json, write
from samestep.records.record import PROGRESS, Progress, RankError
from samestep.records.results import write_results
from samestep.records.run_results import RunResults
from samestep.records.runs import ResultsIdentity
from samestep.report.language import text

WORDS = ("samestep", "run", "my job.py", "--engine", "ddp")


def folder_of(root: Path, name: str, command: str = "run") -> Path:
    about = {"file": "", "samestep": "1", "torch": "2", "package": "", "settings": {}, "launchers": [], "device": "cpu"}
    about |= {"engine_settings": {}, "rounds": 0, "warmup_steps": 0, "measured_steps": 0, "steps": 8, "threads": 0}
    about |= {"command": command, "job": "my job.py", "engines": ["ddp"], "nproc": 2, "nnodes": 1}
    return prepare(root / name, from_json(ResultsIdentity, about))


def results_of(stopped: str | None) -> RunResults:
    return RunResults(
        job="my job.py",
        settings={},
        launcher="torchrun",
        world_size=2,
        threads_per_rank=1,
        engine="ddp",
        engine_settings={},
        global_batch=8,
        init=None,
        steps=8,
        asked_steps=9,
        resumed_from=0,
        stopped=stopped,
        seconds=1.0,
        skipped_steps=0,
        final_loss=0.5,
        curve=[],
        weights_of_step=8,
        evaluation={"loss": 0.25},
        evaluation_rows=4,
        weights="weights.safetensors",
        export=None,
        wait_share=None,
        loader_ceiling=None,
        demand=None,
        advice=None,
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of each outcome, in the order of their names."""
    monkeypatch.chdir(tmp_path)
    curve = [{"step": 3, "loss": 0.5}]
    for name in ("a finished", "b stopped"):
        with recorded(folder_of(tmp_path, name), WORDS):
            pass
        write_results(results_of("early" if "b" in name else None), tmp_path / name)
    with pytest.raises(TrainingFailed), recorded(folder_of(tmp_path, "c failed"), WORDS):
        raise TrainingFailed("ended by SIGKILL")
    for name in ("d killed", "e killed"):
        folder = folder_of(tmp_path, name)
        write(folder / PROGRESS, Progress("run", 0, 4, 9, 64, 0.5, curve))
        with recorded(folder, WORDS):
            killed = (folder / "command.json").read_bytes()
        (folder / "command.json").write_bytes(killed)  # as it is while the block runs
    for step, complete in ((2, True), (10, True), (30, False)):
        checkpoint = tmp_path / "e killed" / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        if complete:
            (checkpoint / "manifest.json").touch()
    write(
        folder_of(tmp_path, "f old") / "error-rank1.json",
        RankError(1, "crash", as_said("ValueError: x"), 1.0, "", False),
    )
    release_folders()
    folder_of(tmp_path, "g running")
    return tmp_path


def test_each_outcome_is_listed(root: Path) -> None:
    found = {Path(run.folder).name: run for run in package.runs(root)}
    assert {name.split()[-1]: run.outcome for name, run in found.items() if "old" not in name} == {
        name: name for name in ("finished", "stopped", "failed", "killed", "running")
    }
    assert found["f old"].outcome == "failed" and found["f old"].reason == as_said("ValueError: x")
    assert found["c failed"].reason == as_said("ended by SIGKILL")
    assert found["b stopped"].reason == message("stopped_without_improvement")
    assert (found["a finished"].steps, found["a finished"].asked_steps) == (8, 9)
    assert (found["d killed"].steps, found["d killed"].asked_steps) == (4, 9)
    assert found["a finished"].evaluation == {"loss": 0.25} and found["d killed"].evaluation == {"loss": 0.5}
    assert found["e killed"].checkpoint == str(root / "e killed" / "checkpoints" / "step-10")
    assert {run.ranks for run in found.values()} == {2}
    release_folders()
    assert {Path(run.folder).name: run.outcome for run in package.runs(root)}["g running"] == "killed"


def test_the_line_continues_or_repeats(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Path(run.folder).name: run for run in package.runs(root)}
    assert shlex.split(found["a finished"].line) == [*WORDS]  # its own folder would be refused
    assert shlex.split(found["d killed"].line) == [*WORDS, "--out", str(root / "d killed")]
    assert found["e killed"].continues and not found["d killed"].continues
    (root / "c failed" / "weights.safetensors").touch()
    monkeypatch.chdir(root / "c failed")
    (again,) = package.runs(root / "c failed")
    assert again.line == f"cd {shlex.quote(str(root))} && {shlex.join(WORDS)}"


def test_a_command_line_has_the_options_that_are_not_at_their_defaults() -> None:
    job, machines = "my job.py:job", MachineOptions(threads=2)
    settings: dict[str, Any] = {"settings": {"lr": 0.1}, "engine_settings": {"bucket_mb": 1}, "nproc": 2}
    more: dict[str, Any] = {"best": "accuracy", "log": ("csv", "wandb"), "on_nan": "skip", "machines": machines}
    words = words_of("run", RunOptions(job, "fsdp", out="a", **settings, **more), job)
    line = "samestep run 'my job.py:job' --nproc 2 --threads 2 --engine fsdp --set lr=0.1 --set-engine bucket_mb=1"
    options = "--best accuracy --log csv,wandb --on-nan skip"
    assert shlex.join(words) == f"{line} {options}"
    proof = VerifyOptions(engines=["ddp", "fsdp"], stall_s=0.0, resume=True, resume_nproc=3)
    line = "samestep verify digits --stall 0.0 --engines ddp,fsdp --resume --resume-nproc 3"
    assert shlex.join(words_of("verify", proof, "digits")) == line


def other_than_default(kind: type[Options], without: Collection[str]) -> Any:
    """Returns options of which none is at its default, but those in `without`."""

    def value(name: str, hint: Any) -> Any:
        if options._is_options(hint):
            return other_than_default(hint, without)
        of: dict[Any, Any] = {bool: not default.get(name), int: 7, float: 7.5, Mapping: {"a": "1"}, Path: Path("p")}
        of |= {tuple: ("word", "other")}
        parts = {get_origin(hint), hint, *get_args(hint), *map(get_origin, get_args(hint))}
        return next((of[each] for each in of if each in parts), "word")

    default = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    hints = {name: hint for name, (hint, _, _) in options._hints(kind).items() if name not in without}
    return kind(**{name: value(name, hint) for name, hint in hints.items()})


COMMANDS: dict[str, Any] = {
    "verify": VerifyOptions,
    "compare": CompareOptions,
    "run": RunOptions,
    "evaluate": EvaluateOptions,
    "collectives": CollectivesOptions,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_reads_every_option_again(command: str) -> None:
    """Both ways, without running it: no option of a run vanishes from the line that repeats it."""
    kind, without = COMMANDS[command], ("out", *COMMANDS[command].NOT_TYPED)
    given = other_than_default(kind, without)
    words = words_of(command, given, "" if command == "collectives" else "word")
    flags = {options.flag_of(of, field.name) for field, of in options._leaves(kind) if field.name not in without}
    assert flags - {"--job"} == {word.replace("--no-", "--") for word in words if word.startswith("--")}
    parser = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    parsed = parser.make_context(command, [*words[2:]]).params
    assert words_of(command, options._packed(kind, parsed), parsed.get("job", "")) == words


def test_the_table_fits(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        show_runs(package.runs(root))
        table, _, lines = capsys.readouterr().out.partition("\n\n")
        assert max(map(len, table.splitlines())) <= width
        assert all(outcome in table for outcome in ("finished", "stopped", "failed", "killed", "running"))
        assert "continue: samestep run" in lines


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        package.runs(tmp_path / "nowhere")


def test_a_damaged_folder_ends_no_list(root: Path) -> None:
    for name in ("study.json", "command.json", "results.json"):
        (root / "a finished" / name).write_text("{")
    listed = {Path(run.folder).name: run for run in package.runs(root)}
    assert len(listed) == 7 and listed["a finished"].outcome == "unknown"


def test_a_reason_without_its_fields_ends_no_list(tmp_path: Path) -> None:
    """As after an upgrade, or in a folder from elsewhere: through the command, beside a healthy run."""
    for name, reason in (("healthy", as_said("ended by SIGKILL")), ("other", message("ranks_share_evenly"))):
        with pytest.raises(TrainingFailed), recorded(folder_of(tmp_path, name), WORDS):
            raise TrainingFailed(reason)
    release_folders()
    command = [sys.executable, "-m", "samestep", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=budget(20), check=True)
    without_fields = text(message("ranks_share_evenly"), "en")
    assert "  ended by SIGKILL" in done.stdout and f"  {without_fields}" in done.stdout and not done.stderr


def test_a_folder_of_another_version_is_unknown_and_says_so(root: Path) -> None:
    path = root / "a finished" / "study.json"
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {OLDEST - 1}'))
    (run,) = package.runs(root / "a finished")
    assert run.outcome == "unknown" and run.line == shlex.join(WORDS)
    assert run.reason and str(path) in str(run.reason) and f"schema {OLDEST - 1}" in str(run.reason)


def test_a_training_that_fails_is_listed_with_its_sentence(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    job = f"{TESTS}/rank/poisoned.py:job"
    failed = samestep("run", job, "--engine", "single", "--set", "poison=loss", "--launcher", "fork", out=out)
    assert failed.returncode == 2, failed.stderr
    command = [sys.executable, "-m", "samestep", "runs", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=budget(20), check=True)
    listed = json.loads(done.stdout)
    (run,) = listed["runs"]
    assert listed["schema"] == SCHEMA
    assert run["outcome"] == "failed" and f"samestep: {run['reason']['english']}" == failed.stderr.splitlines()[-1]
    assert run["reason"]["id"] and "not finite" in run["reason"]["english"]
    assert "--set poison=loss" in run["line"] and run["engines"] == ["single"]
