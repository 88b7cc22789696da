"""The steps for GitHub and GitLab, run as a runner runs them: the summary has the first difference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from against.plant import committed, git
from budget import budget
from planting import Edit, plant_in_files

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "samestep-check" / "action.yml"
TEMPLATE = ROOT / "ci" / "samestep-check.gitlab-ci.yml"
OPTIONS = "--launcher\nfork\n--steps\n3"


def loaded(file: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    read: dict[str, Any] = yaml.safe_load(file.read_text())
    return read


def pull_request(folder: Path, old: str, new: str) -> Path:
    """A clone of a repository, whose branch has changed the script."""
    committed(folder / "upstream")
    git(folder, "clone", "-q", "upstream", "clone")
    clone = folder / "clone"
    git(clone, "checkout", "-q", "-b", "change")
    plant_in_files(clone, [Edit(old, new)], "train.py")
    git(clone, "commit", "-q", "-a", "-m", "a change")
    (clone / "images.pt").write_bytes((folder / "upstream" / "images.pt").read_bytes())
    return clone


def run(script: str, clone: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a step; samestep is a command on PATH."""
    command = clone.parent / "bin" / "samestep"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m samestep "$@"\n')
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"} | variables
    shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(shell, cwd=clone, env=env, capture_output=True, text=True, timeout=budget(150))


@pytest.mark.check
@pytest.mark.parametrize(
    ("new", "code", "said"), [("(0.9, 0.99)", 1, "betas = 0.9, 0.99"), ("(0.90, 0.95)", 0, "took the 3 steps")]
)
def test_the_action_s_summary_names_the_first_difference(new: str, code: int, said: str, tmp_path: Path) -> None:
    clone = pull_request(tmp_path, "(0.9, 0.95)", new)
    install, compare = loaded(ACTION)["runs"]["steps"]
    summary = tmp_path / "summary.md"
    given = {"script": "train.py", "arguments": "--lr\n0.003", "against": "", "nproc": "2", "options": OPTIONS}
    values = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], v) for name, v in compare["env"].items()
    }
    values |= {"GITHUB_BASE_REF": "main", "GITHUB_STEP_SUMMARY": str(summary)}
    done = run(compare["run"], clone, values)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in summary.read_text() and said in done.stdout
    if code:
        assert "origin/main:train.py:" in summary.read_text() and "+    optimizer =" in summary.read_text()
    assert "inputs." not in compare["run"] and "inputs." not in install["run"], "an input is no part of a script"


@pytest.mark.check
def test_gitlab_s_job_names_the_first_difference(tmp_path: Path) -> None:
    clone = pull_request(tmp_path, "label_smoothing=0.1", "label_smoothing=0.2")
    job = loaded(TEMPLATE)[".samestep-check"]
    variables = job["variables"] | {"SAMESTEP_OPTIONS": OPTIONS, "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main"}
    (script,) = job["script"]
    done = run(script, clone, variables)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "loss" in (clone / "samestep.txt").read_text() and "label_smoothing=0.2" in done.stdout
    assert job["artifacts"]["paths"] == ["samestep.txt"]
