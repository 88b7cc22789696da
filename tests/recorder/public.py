"""Checks public scripts, as they are and with planted faults, on two ranks and small data made on the fly.

    python tests/recorder/public.py --checkouts FOLDER [--out FOLDER] [--only WORDS]

FOLDER/OWNER+NAME is a git repository, as a clone, that has the commit which the script is taken from. --out keeps every
row in rows.json, and writes the tables of tests/scripts.md again; rows that --only leaves out stay as they were.
Exit 0 when no script differs that is right, and every fault is caught.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from budget import budget
from command import samestep
from fork_servers import WORKER, fork_servers
from planting import Edit, plant_in_files
from recorder.plant import cause_of
from recorder.public_scripts import CASES
from recorder.public_scripts.case import Case, Plant
from recorder.public_table import Row, summary, written
from samestep.records.files import from_json
from samestep.records.findings import CheckResults, question_of

STANDINS = Path(__file__).parent / "standins"
PACKAGES = STANDINS / "packages"
AS_IT_IS, EDITED = "", "(edited)"


def taken(case: Case, checkouts: Path, target: Path) -> None:
    """Writes a script's folder, as it is at the commit, below `target`."""
    repo = checkouts / case.repo.replace("/", "+")
    paths = case.parts or ([case.folder] if case.folder else _small(repo, case.commit))
    command = ["git", "-C", str(repo), "archive", case.commit, *paths]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{repo} has no {case.script} at {case.commit}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")


def _small(repo: Path, commit: str) -> list[str]:
    """Returns the Python files of a repository's root: large ones may be missing in a mirror."""
    done = subprocess.run(["git", "-C", str(repo), "ls-tree", "--name-only", commit], capture_output=True, text=True)
    return [name for name in done.stdout.splitlines() if name.endswith(".py")]


def checked(case: Case, folder: Path, env: Mapping[str, str]) -> CheckResults | str:
    """Checks a script; returns the error where it has failed."""
    out = Path(tempfile.mkdtemp(prefix="samestep-public-"))
    done = samestep(*words_of(case, folder, out / "out"), cwd=folder / case.cwd, env=env)
    # The record names no folder of the machine that made it.
    said, error = (text.replace(f"{out}/", "") for text in (done.stdout, done.stderr))
    if not said.startswith("{"):
        return " ".join(error.split())[-400:]
    return from_json(CheckResults, json.loads(said))


def words_of(case: Case, folder: Path, out: Path) -> list[str]:
    """Makes the data of a script, and returns what is typed after `samestep` to check it."""
    if case.prepare:
        case.prepare(folder)
    script = os.path.relpath(folder / case.script, folder / case.cwd)
    words = ["check", "--nproc", str(case.ranks), "--json", "--stall", f"{budget(40):.0f}"]
    words += ["--out", str(out), *(["--as-cpu"] if case.on_gpus else []), *case.options]
    words += ["--", *map(_program, case.command)] if case.command else ["--launcher", "fork"]
    return [*words, *(["-m", case.module] if case.module else [script]), *case.arguments]


def _program(word: str) -> str:
    """Returns a command's word; a program of this Python's environment with its path."""
    path = Path(sys.executable).with_name(word)
    return str(path) if path.exists() else word


def row_of(case: Case, name: str, results: CheckResults | str, fault: Plant | None, seconds: float) -> Row:
    if isinstance(results, str):
        return Row(case.name, name, "failed", "", None, results, "", False, False, seconds)
    first = results.first_divergence
    question = question_of(results)
    unknown = [f"{finding.question}: {finding.message}" for finding in results.findings if finding.answer == "unknown"]
    caught = results.answer == "differs"
    named = bool(first and fault and (question, cause_of(first)) == (fault.question, fault.cause))
    warned = [f"warning: {finding.message}" for finding in results.findings if finding.answer == "warning"]
    cause, step = (str(first.cause), first.step) if first else ("; ".join(warned), None)
    return Row(case.name, name, results.answer, question, step, cause, "; ".join(unknown), caught, named, seconds)


@contextmanager
def server(before: Sequence[str], packages: bool) -> Iterator[None]:
    """Runs a fork server that has imported the stand-ins."""
    lines = [f"import sys; sys.path.insert(0, {str(STANDINS)!r})", *(f"import {name}" for name in before)]
    lines += [f"sys.path.append({str(PACKAGES)!r})"] * packages
    with fork_servers("; ".join([*lines, WORKER]), ["ranks"]):
        yield


def plays(case: Case) -> list[tuple[str, Plant | None, tuple[Edit, ...]]]:
    """Returns what is checked of a script: its name in the table, the fault, and all edits."""
    edits = (*case.sizes, *case.edits)
    healthy = [(AS_IT_IS, None, case.sizes)] + ([(EDITED, None, edits)] if case.edits else [])
    return [*healthy, *((each.name, each, (*edits, *each.edits)) for each in case.plants)]


def played(case: Case, name: str, fault: Plant | None, edits: Sequence[Edit], checkouts: Path) -> Row:
    with tempfile.TemporaryDirectory(prefix="samestep-public-") as folder:
        began = time.monotonic()
        taken(case, checkouts, Path(folder))
        plant_in_files(Path(folder), edits, case.script)
        results = checked(case, Path(folder), environment_of(case))
        return row_of(case, name, results, fault, round(time.monotonic() - began, 1))


def environment_of(case: Case) -> dict[str, str]:
    env = dict(case.env)
    if case.command and case.packages:  # its ranks are no children of the fork server
        env["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(PACKAGES)])
    return env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the repositories, each OWNER+NAME")
    parser.add_argument("--out", type=Path, help="keep every row in this folder, and write tests/scripts.md")
    parser.add_argument("--only", default="", help="scripts and faults whose names match this expression")
    options = parser.parse_args()
    asked = [(c, *play) for c in CASES for play in plays(c) if re.search(options.only, f"{c.name}|{play[0]}|")]
    rows: list[Row] = []
    for kind in dict.fromkeys((case.before, bool(case.packages)) for case, *_ in asked):
        with server(*kind):
            for case, name, fault, edits in asked:
                if (case.before, bool(case.packages)) != kind:
                    continue
                rows.append(played(case, name, fault, edits, options.checkouts))
                print(rows[-1].line(case, fault), flush=True)
                if options.out:
                    written(CASES, rows, options.out)
    print(summary(CASES, rows))
    return int(any(row.is_wrong(next(c for c in CASES if c.name == row.script)) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
