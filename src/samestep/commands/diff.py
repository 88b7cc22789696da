"""diff: compares the records that two runs of `samestep check` have kept."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import UserError
from samestep.proof.script import first_divergence
from samestep.proof.script.compare import compare, steps_of
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.script import PLAN, Answer, DiffResults, ScriptPlan, ScriptRecord

NEEDED = ("gradient", "rows", "rate")  # without these answers nothing is the same


def diff(first: Path, second: Path) -> DiffResults:
    """Compares two folders of records; the first is what is expected. Raises UserError for a folder that is none."""
    one, other = _ranks(first), _ranks(second)
    findings = compare(one, other, Record(first), Record(second))
    answers = {each.question: each.answer for each in findings}
    answer: Answer = "differs" if "differs" in answers.values() else "unknown"
    if answer == "unknown" and all(answers.get(name) == "right" for name in NEEDED):
        answer = "right"
    notes = []
    if len(one) != len(other):
        notes.append(f"the first is of {len(one)} ranks, the second of {len(other)}")
    return DiffResults(
        str(first), str(second), steps_of(one, other), answer, findings, first_divergence(findings), notes
    )


def _ranks(folder: Path) -> list[ScriptRecord]:
    if not (folder / PLAN).is_file():
        kind = "holds no record of samestep check" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {kind}; give two folders that samestep check has written (--out)")
    read(ScriptPlan, folder / PLAN)
    files = sorted(folder.glob("rank[0-9]*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
    ranks = [read(ScriptRecord, file) for file in files]
    if not ranks or len(ranks) != ranks[0].size:
        size = ranks[0].size if ranks else "its"
        raise UserError(f"{folder} has the records of {len(ranks)} of {size} ranks; run samestep check again")
    return ranks
