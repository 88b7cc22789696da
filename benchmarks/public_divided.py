"""Checks public scripts that divide a model over their ranks, as they are and edited; keeps what the command says.

    python benchmarks/public_divided.py --checkouts FOLDER [--out FOLDER] [--only WORDS]

FOLDER/OWNER+NAME is a git repository that has the commit which a script is taken from. --out keeps the results of
each run as a file of JSON, or the text where it has failed, and the table of them all.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planting import Edit, plant_in_files
from recorder.public import checked, plays, server, taken
from recorder.public_scripts.case import Case, Plant
from recorder.public_scripts.divided import DIVIDED
from samestep.records.findings import CheckResults


def row_of(case: Case, name: str, results: CheckResults | str, seconds: float) -> dict[str, object]:
    """Returns what the table tells of a run."""
    row: dict[str, object] = {
        "script": case.name,
        "edit": name,
        "repository": case.repo,
        "commit": case.commit,
        "path": case.script,
        "ranks": case.ranks,
        "arguments": " ".join(case.arguments),
        "seconds": seconds,
    }
    if isinstance(results, str):
        return row | {"answer": "failed", "found": results}
    by_answer: dict[str, list[str]] = {}
    for finding in results.findings:
        by_answer.setdefault(finding.answer, []).append(finding.question)
    found = [f"{f.question}: {f.message}" for f in results.findings if f.answer in ("differs", "warning")]
    of_script = [
        [site for site in f.sites if "standins" not in site.file] for f in results.findings if f.answer == "differs"
    ]
    sites = [f"{site.file}:{site.line}" for of_finding in of_script for site in of_finding[:1]]
    return row | {
        "answer": results.answer,
        "notes": [str(note) for note in results.notes],
        "right": by_answer.get("right", []),
        "unknown": {f.question: str(f.message) for f in results.findings if f.answer == "unknown"},
        "first": results.first_divergence.quantity if results.first_divergence else "",
        "causes": [f.message.id for f in results.findings if f.answer in ("differs", "warning")],
        "found": found,
        "sites": [re.sub(r".*/samestep-public-\w+/", "", site) for site in sites],
    }


def played(case: Case, name: str, fault: Plant | None, edits: Sequence[Edit], checkouts: Path) -> tuple[dict, str]:
    """Returns the row of a run, and its raw results."""
    with tempfile.TemporaryDirectory(prefix="samestep-public-") as folder:
        taken(case, checkouts, Path(folder))
        plant_in_files(Path(folder), edits, case.script)
        began = time.monotonic()
        results = checked(case, Path(folder), dict(case.env))
        seconds = round(time.monotonic() - began, 1)
    raw = results if isinstance(results, str) else json.dumps(asdict(results), indent=1, default=str)
    return row_of(case, name, results, seconds), raw.replace(folder, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for case in DIVIDED:
        for name, fault, edits in plays(case):
            if not re.search(options.only, f"{case.name}|{name}|"):
                continue
            with server(case.before, bool(case.packages)):
                row, raw = played(case, name, fault, edits, options.checkouts)
            print(
                row["script"], "|", name, "|", row["answer"], "|", row["seconds"], "s |", row.get("notes"), flush=True
            )
            for key in ("found", "unknown"):
                print("   ", key, str(row.get(key))[:900], flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                file = re.sub(r"\W+", "_", f"{case.name} {name}").strip("_")
                (options.out / f"{file}.json").write_text(raw + "\n")
                with (options.out / "rows.jsonl").open("a") as rows:
                    rows.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
