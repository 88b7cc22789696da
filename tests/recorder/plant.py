"""Checks each script as it is, and with each fault, one at a time; prints which are caught and rightly named.

    python tests/recorder/plant.py [--out FOLDER] [--only WORDS]

Exit 0 when no healthy script differs, and every fault is caught and named. --out keeps every row in rows.json, and
writes the table of docs/check.md again; rows that --only leaves out stay as they were.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from command import samestep
from fork_servers import fork_servers
from planting import Edit, Patch, with_patches
from recorder.beside_faults import BESIDE_FAULTS
from recorder.faults import FAULTS, HEALTHY, Fault
from recorder.replay_faults import REPLAY_FAULTS
from samestep.message import Message
from samestep.records.files import from_json
from samestep.records.findings import CheckResults, question_of
from samestep.records.results import Divergence

ALL = (*FAULTS, *REPLAY_FAULTS, *BESIDE_FAULTS)
HERE = Path(__file__).parent
SCRIPT = "train.py"
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
DOCS = HERE.parents[1] / "docs" / "check.md"
CHINESE = DOCS.parent / "zh" / "check.md"


@dataclass(frozen=True)
class Row:
    """What one check said. named: whether the question and the cause are those of the fault."""

    script: str
    fault: str
    answer: str
    question: str
    step: int | None
    tensor: str | None
    rank: int | None
    cause: str
    caught: bool
    named: bool


def checked(
    script: str, folder: Path, *arguments: str, nproc: int = 2, script_arguments: Sequence[str] = ()
) -> CheckResults:
    """Checks a script of this text. arguments: the command's own."""
    done = samestep(*words_of(script, folder, *arguments, nproc=nproc), *script_arguments, cwd=folder)
    assert done.stdout, done.stderr
    return from_json(CheckResults, json.loads(done.stdout))


def words_of(script: str, folder: Path, *arguments: str, nproc: int = 2) -> list[str]:
    """Writes a script of this text, and returns what is typed after `samestep` to check it."""
    (folder / SCRIPT).write_text(script)
    words = ["check", "--nproc", str(nproc), "--json", *arguments, "--out", str(folder / "out")]
    by_horovod = ["--", HOROVODRUN, "-np", str(nproc), "--gloo", sys.executable] if "import horovod" in script else []
    return [*words, *(by_horovod or ["--launcher", "fork"]), SCRIPT]


def text_of(script: str, *patches: Patch) -> str:
    """Returns the text of a script with patches; of 'NAME NUMBER' at that stage of ZeRO. Raises ValueError where one
    does not apply."""
    name, _, stage = script.partition(" ")
    at_stage = [Edit("STAGE = 0", f"STAGE = {stage}")] if stage else []
    return with_patches((HERE / "scripts" / f"{name}.py").read_text(), *at_stage, *patches)


def row_of(script: str, results: CheckResults, fault: Fault | None = None) -> Row:
    first = results.first_divergence
    question = question_of(results)
    caught = results.answer == "differs"
    named = bool(first and fault and (question, cause_of(first)) == (fault.question, fault.cause))
    where = (first.step, first.tensor, first.rank, str(first.cause)) if first else (None, None, None, "")
    return Row(script, fault.name if fault else "", results.answer, question, *where, caught, named)


def cause_of(divergence: Divergence) -> str:
    """Returns the id of a divergence's cause."""
    return divergence.cause.id if isinstance(divergence.cause, Message) else ""


def summary(rows: Sequence[Row]) -> str:
    healthy, faults = [row for row in rows if not row.fault], [row for row in rows if row.fault]
    return (
        f"{len(healthy)} healthy scripts: {sum(row.caught for row in healthy)} false alarms; {len(faults)} plantings: "
        f"{sum(row.caught for row in faults)} caught, {sum(row.named for row in faults)} rightly named"
    )


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| script | fault | answer | found in | at step | named |", "|---" * 6 + "|"]
    for row in rows:
        step = "" if row.step is None else row.step
        named = ("yes" if row.named else "no") if row.fault else ""
        lines.append(f"| {row.script} | {row.fault or 'none'} | {row.answer} | {row.question} | {step} | {named} |")
    return "\n".join(lines)


def merged(rows: Sequence[Row], record: Path) -> list[Row]:
    """Returns the rows with those that a record holds of other scripts and faults, in the order of both lists."""
    kept = [Row(**each) for each in json.loads(record.read_text())] if record.exists() else []
    of = {(row.script, row.fault): row for row in [*kept, *rows]}
    order = [(script, "") for script in HEALTHY] + [(fault.script, fault.name) for fault in ALL]
    return [of[key] for key in order if key in of]


def is_right(row: Row) -> bool:
    return row.named if row.fault else row.answer == "right"


def tried(script: str, fault: Fault | None) -> Row:
    """Checks a script, with the fault if there is one."""
    with tempfile.TemporaryDirectory(prefix="samestep-check-") as folder:
        try:
            return row_of(script, checked(text_of(script, *([fault] if fault else [])), Path(folder)), fault)
        except AssertionError as error:
            failed = f"failed: {error}"
            return Row(script, fault.name if fault else "", failed, "", None, None, None, "", False, False)


def write(rows: Sequence[Row], out: Path) -> None:
    """Writes the record, and the figures and the table of the docs in both languages."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    docs = re.sub(r"\*\*\d+ healthy scripts: .*?\*\*", f"**{summary(rows)}.**", DOCS.read_text())
    table = r"\| script \| fault \| answer .*?\n(?=\n|$)"
    DOCS.write_text(re.sub(table, lambda _: markdown(rows) + "\n", docs, flags=re.S))
    total = iter(re.findall(r"\d+", summary(rows)))  # the page in Chinese has the same figures in the same order
    CHINESE.write_text(
        re.sub(
            r"\*\*\d+ 个正确的脚本.*?\*\*",
            lambda line: re.sub(r"\d+", lambda _: next(total), line[0]),
            CHINESE.read_text(),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep every row in this folder, and write the table of the docs")
    parser.add_argument("--only", default="", help="scripts and faults whose names match this expression")
    options = parser.parse_args()
    rows = []
    with fork_servers():
        for script, fault in [(script, None) for script in HEALTHY] + [(fault.script, fault) for fault in ALL]:
            if not re.search(options.only, f"{script} {fault.name if fault else ''}"):
                continue
            rows.append(row := tried(script, fault))
            found = (row.answer, row.question, row.step, row.tensor, row.rank)
            print("  " if is_right(row) else "! ", row.script, "|", row.fault, "|", *found, "|", row.cause, flush=True)
    if not rows:
        parser.error(f"--only {options.only}: no script or fault matches")
    print(summary(rows))
    if options.out:
        rows = merged(rows, options.out / "rows.json")
        write(rows, options.out)
    return int(not all(map(is_right, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
