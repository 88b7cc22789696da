"""Compares changes of a script with what it was, by the real command: those of its training, and healthy ones.

    python benchmarks/against.py [--only WORDS] [--out FOLDER]

Each change of tests/against/changes.toml is made in a git repository of its own; `samestep check --against main --json`
compares the working directory with the commit. A planted change is caught where the command exits with 1, named where
the first difference is of the change's question and step and has a line on both sides, and its lines are told where the
first changed place that is shown holds them: beside each stand four others that change nothing. A healthy change is
right where the command exits with 0.

--out keeps against.jsonl, a line for each change, and table.md. Exit code 1 where a change is not right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from against.changes import CHANGES, Change
from against.plant import first_change, named_by, results_of, words_of
from fork_servers import fork_servers
from user_command import ended

PATIENCE_S = 180


def compared(changed: Change, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    done = ended(words_of(changed, folder), folder, cwd=folder, limit_s=PATIENCE_S)
    row: dict[str, Any] = {"name": changed.name, "planted": changed.kind == "planted", "code": done.code}
    row["seconds"] = round(time.monotonic() - began, 1)
    if done.code not in (0, 1, 3) or not done.output:
        return {**row, "right": False, "error": done.error[-400:]}
    results = results_of(done.output)
    first, question = results.first_divergence, named_by(results)
    row["answer"], row["question"] = results.answer, question
    row["bitwise"] = [f.message.id for f in results.findings if f.question in ("gradient", "weights")]
    if not row["planted"]:
        return {**row, "right": done.code == 0, "step": first.step if first else None}
    found = next((finding for finding in results.findings if first and finding.divergence == first), None)
    place = first_change(results)
    row["step"] = first.step if first else None
    row["caught"] = done.code == 1
    row["named"] = question in changed.questions and row["step"] == changed.step
    row["both sides"] = bool(found and found.sites and found.expected_sites)
    row["lines"] = bool(place and changed.line in place.text)
    row["expected"], row["found"] = (str(first.expected), str(first.found)) if first else ("", "")
    row["sites"] = [f"{Path(s.file).name}:{s.line}" for s in (found.sites if found else [])]
    return {**row, "right": all(row[name] for name in ("caught", "named", "both sides", "lines"))}


def table(rows: list[dict[str, Any]]) -> str:
    planted, healthy = ([row for row in rows if row["planted"] is kind] for kind in (True, False))
    lines = [
        "| planted change | first difference | at step | caught | named | lines told |",
        "|---|---|---|---|---|---|",
    ]
    for row in planted:
        told = ["yes" if row.get(name) else "no" for name in ("caught", "named", "lines")]
        lines.append(f"| {row['name']} | {row.get('question')} | {row.get('step')} | {' | '.join(told)} |")
    lines += ["", "| healthy change | answer | steps |", "|---|---|---|"]
    for row in healthy:
        bits = "to the last bit" if "gradients_bitwise_the_same" in row.get("bitwise", []) else "within rounding"
        lines.append(f"| {row['name']} | {row.get('answer', 'failed')} | {bits} |")
    counts = [f"{sum(bool(row.get(n)) for row in planted)} {n}" for n in ("caught", "named", "both sides", "lines")]
    right = sum(row["right"] for row in healthy)
    seconds = sorted(row["seconds"] for row in rows)
    said = f"{len(planted)} planted: {', '.join(counts)}. {len(healthy)} healthy: {right} right."
    return "\n".join([*lines, "", f"{said} Median {seconds[len(seconds) // 2]} s a comparison.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with fork_servers(), tempfile.TemporaryDirectory(prefix="samestep-changes-") as temporary:
        for number, changed in enumerate(CHANGES):
            if options.only not in changed.name:
                continue
            row = compared(changed, Path(temporary, str(number), "project"))
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "against.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (options.out / "table.md").write_text(table(rows))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
