"""Compares public scripts with what they were: their own histories, planted changes of the training, and refactorings.

    python benchmarks/against_public.py --checkouts FOLDER [--only WORDS] [--out FOLDER [--missing]]

FOLDER/OWNER+NAME is a git repository with the commits that tests/against/public.toml names. Each change is made in a
git repository of its own, of the script as tests/recorder/public_scripts runs it, and `samestep check --against main`
compares the working directory with the commit. Right is: exit code 0 where the training is the same; 1, and a first
difference of one of the change's questions, where it is not.

--out keeps rows.jsonl, a line for each change (lines that --only leaves out stay), and table.md, and writes the figures
in its README again. Exit code 1 where a change is not right.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from against.changes import Change, changes_of
from against.plant import first_change, git, make_change, named_by, results_of
from against.public_cases import AGAINST_CASES
from planting import plant_in_files
from recorder.public import STANDINS, server, taken
from recorder.public_scripts.case import Case

PATIENCE_S = 400
FIGURES = "**In figures.** "  # a paragraph of the README, written again


def made(case: Case, changed: Change, checkouts: Path, folder: Path) -> None:
    """Commits the script as it was, and leaves it as it is after the change."""
    folder.mkdir(parents=True)
    before = case if not changed.commits else replace(case, commit=changed.commits[0])
    taken(before, checkouts, folder)
    plant_in_files(folder, (*case.sizes, *(case.edits if not changed.commits else ())), case.script)
    # Made data may stand in the place of a file of the repository's.
    if case.prepare and not changed.commits:
        case.prepare(folder)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "as it was")
    if changed.commits:
        for path in folder.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        taken(replace(case, commit=changed.commits[1]), checkouts, folder)
        plant_in_files(folder, case.sizes, case.script)
        git(folder, "add", "-A")
    make_change(changed, folder, case.script)
    if case.prepare and changed.commits:
        case.prepare(folder)


def compared(case: Case, changed: Change, checkouts: Path, folder: Path) -> dict[str, Any]:
    made(case, changed, checkouts, folder)
    cwd = folder / case.cwd
    words = ["check", "--against", "main", "--nproc", str(case.ranks), "--steps", str(changed.steps), "--json"]
    words += case.options
    words += [f"--with={each}" for each in changed.packages] or ["--launcher", "fork"]
    words += ["-m", case.module] if case.module else [os.path.relpath(folder / case.script, cwd)]
    words += changed.arguments.split() or case.arguments
    began = time.monotonic()
    row: dict[str, Any] = {"kind": changed.kind, "script": changed.script, "name": changed.name}
    row |= {"commits": [*changed.commits]}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "samestep", *words],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | dict(case.env) | {"COLUMNS": "200"} | (stand_ins(case) if changed.packages else {}),
        )
    except subprocess.TimeoutExpired:
        return {**row, "right": False, "seconds": PATIENCE_S, "error": f"no end after {PATIENCE_S} s"}
    row |= {"code": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    if done.returncode not in (0, 1, 3) or not done.stdout.startswith("{"):
        return {**row, "right": False, "error": done.stderr[-600:]}
    results = results_of(done.stdout)
    first, question, place = results.first_divergence, named_by(results), first_change(results)
    row |= {"answer": results.answer, "steps": results.steps, "question": question}
    row["unknown"] = [f.question for f in results.findings if f.answer == "unknown"]
    row["bitwise"] = "gradients_bitwise_the_same" in [f.message.id for f in results.findings]
    row["distance"] = next((f.message.fields["first"] for f in results.findings if "first" in f.message.fields), None)
    row["notes"] = [note.id for note in results.notes]
    if first:
        found = next(finding for finding in results.findings if finding.divergence == first)
        row |= {"step": first.step, "tensor": first.tensor, "expected": str(first.expected), "found": str(first.found)}
        row["both sides"] = bool(found.sites and found.expected_sites)
        row["told"] = place.text if place else ""
    right = question in changed.questions if changed.questions else done.returncode == 0
    return {**row, "right": right, "caught": done.returncode == 1}


def stand_ins(case: Case) -> dict[str, str]:
    """Returns the variables by which ranks that no fork server starts import a case's stand-ins."""
    path = os.pathsep.join([str(STANDINS / "at_start"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "STANDINS": " ".join(case.before)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| kind | script | change | answer | first difference | at step | right |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step = "" if row.get("step") is None else row["step"]
        answer, right = row.get("answer", "failed"), "yes" if row["right"] else "no"
        said = [row["kind"], row["script"], row["name"], answer, row.get("question", ""), step, right]
        lines.append(f"| {' | '.join(map(str, said))} |")
    return "\n".join([*lines, "", figures(rows), ""])


def figures(rows: Sequence[Mapping[str, Any]]) -> str:
    same, others = ([row for row in rows if bool(row["questions"]) is changes] for changes in (False, True))
    healthy = sum(row["right"] for row in same)
    alarms = sum(row.get("code") == 1 for row in same)
    unknown = len(same) - healthy - alarms
    caught, named = sum(bool(row.get("caught")) for row in others), sum(row["right"] for row in others)
    passed = [row for row in others if row.get("code") == 0]
    noted = sum(len(row["notes"]) > 1 for row in passed)
    commits = [sum(row["kind"] == "history" for row in of_kind) for of_kind in (same, others)]
    seconds = sorted(row["seconds"] for row in rows) or [0]
    return (
        f"{len(same)} changes that leave the training as it is, {commits[0]} of them commits of the repositories: "
        f"{healthy} the same, {alarms} false alarms, {unknown} unknown or failed. {len(others)} changes of the "
        f"training, {commits[1]} of them commits: {caught} caught, {named} named, {len(passed)} "
        f"pass as rounding, {noted} of these with a note. "
        f"{len({row['script'] for row in rows})} scripts; median {seconds[len(seconds) // 2]} s a comparison."
    )


def rows_of(out: Path | None) -> list[dict[str, Any]]:
    """Returns the rows that a folder has."""
    file = out / "rows.jsonl" if out else None
    return [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []


def written(rows: Sequence[Mapping[str, Any]], asked: Sequence[Change], out: Path) -> None:
    """Writes the rows, with those that the folder has of other changes, in the order of public.toml."""
    out.mkdir(parents=True, exist_ok=True)
    of = {(row["kind"], row["script"], row["name"]): row for row in [*rows_of(out), *rows]}
    order = [(each.kind, each.script, each.name) for each in asked]
    all_rows = [of[key] | {"questions": [*each.questions]} for key, each in zip(order, asked) if key in of]
    (out / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in all_rows))
    (out / "table.md").write_text(table(all_rows))
    if (readme := out / "README.md").exists():
        before, mark, rest = readme.read_text().partition(FIGURES)
        _, _, after = rest.partition("\n\n")
        readme.write_text(f"{before}{mark}{figures(all_rows)}\n\n{after}" if mark else before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the repositories, each OWNER+NAME")
    parser.add_argument("--only", default="", help="changes whose kind, script and name match this expression")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--missing", action="store_true", help="only changes of which --out has no row")
    options = parser.parse_args()
    asked = changes_of("public.toml")
    cases = {case.name: case for case in AGAINST_CASES}
    chosen = [each for each in asked if re.search(options.only, f"{each.kind} {each.script} {each.name}")]
    if options.missing:
        recorded = {(row["kind"], row["script"], row["name"]) for row in rows_of(options.out)}
        chosen = [each for each in chosen if (each.kind, each.script, each.name) not in recorded]
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys((cases[each.script].before, bool(cases[each.script].packages)) for each in chosen):
        with server(*kind), tempfile.TemporaryDirectory(prefix="samestep-public-") as temporary:
            for number, each in enumerate(chosen):
                case = cases[each.script]
                if (case.before, bool(case.packages)) != kind:
                    continue
                row = compared(case, each, options.checkouts, Path(temporary, str(number), "project"))
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.out:
                    written(rows, asked, options.out)
    print("\n".join(f"not right: {row['script']}: {row['name']}" for row in rows if not row["right"]))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
