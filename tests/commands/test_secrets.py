"""No secret that was typed is written down, but in the plan of the ranks, which is this user's alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from budget import deadline
from command import JOBS, samestep
from samestep.commands.results_folder import write_into
from samestep.records.files import write_json

SECRET = "s3cr3t-Value"


def told(folder: Path) -> dict[str, int]:
    """The files that hold the secret, with their modes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.stat().st_mode & 0o777 for path in files if SECRET.encode() in path.read_bytes()}


def test_no_file_of_a_run_tells_a_secret(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(f"import sys\nsys.path.insert(0, {str(JOBS.parent)!r})\nimport jobs\n\n")
    job.write_text(f"{job.read_text()}def job(api_key: str = ''):\n    assert api_key\n    return jobs.quick()\n")
    out = tmp_path / "out"
    secret = ["--set", f"api_key={SECRET}"]
    done = samestep("run", str(job), *secret, "--checkpoint-every", "1epoch", *deadline(), out=out)
    assert done.returncode == 0, done.stderr
    assert {*told(out)} == {"plan.json"} and {*told(out).values()} == {0o600}, told(out)
    assert "api_key=***" in (out / "command.json").read_text()
    again = samestep("run", str(job), "--set", "api_key=another", "--resume", "auto", *deadline(), out=out)
    assert again.returncode == 0, again.stderr  # a token that has been changed since is the same training


@pytest.mark.parametrize("words", [["--token", SECRET], ["sh -c", f"HF_TOKEN={SECRET} true"]])
def test_no_file_of_a_monitored_command_tells_a_secret(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = samestep("monitor", "--out", str(out), "--", sys.executable, "-S", "-c", "pass", *words)
    assert done.returncode == 0 and SECRET not in done.stderr, done.stderr
    assert told(out) == {} and "***" in (out / "usage.json").read_text()


def test_what_holds_values_as_given_is_of_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "e.json").touch(mode=0o644)  # of an older launch
    write_json(tmp_path / "e.json", {"HF_TOKEN": SECRET}, private=True)
    write_json(tmp_path / "results.json", {"HF_TOKEN": "***"})
    write_into(tmp_path, "slurm.sh", f"srun samestep run --set api_key={SECRET}\n")
    assert told(tmp_path) == {"e.json": 0o600, "slurm.sh": 0o600}
    assert (tmp_path / "results.json").stat().st_mode & 0o444 == 0o444
