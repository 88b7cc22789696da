"""diff: compares the records that two runs of `samestep check` have kept."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import UserError
from samestep.proof.script import first_divergence
from samestep.proof.script.compare import RecordPair, compare
from samestep.proof.script.updates import common_steps
from samestep.records.files import read
from samestep.records.record import Record, rank_files
from samestep.records.script import PLAN, Answer, DiffResults, ScriptPlan, ScriptRecord

NEEDED = ("gradient", "rows", "rate")  # without these answers nothing is the same


def diff(first: Path, second: Path, resumed_at: int = 0) -> DiffResults:
    """Compares two folders of records; the first is what is expected.

    resumed_at: steps of the first before the checkpoint with which the second began. Raises UserError for a folder that
    is none, and where the first has no step after the checkpoint.
    """
    of = RecordPair(_ranks(first), _ranks(second), Record(first), Record(second), resumed_at)
    taken = len(common_steps(of.one))
    if resumed_at and taken <= resumed_at:
        raise UserError(
            f"--resumed-at {resumed_at}: {first} has {taken} steps, and none after the checkpoint; record more of them "
            "(samestep check --steps)"
        )
    findings = compare(of)
    answers = {each.question: each.answer for each in findings}
    answer: Answer = "differs" if "differs" in answers.values() else "unknown"
    if answer == "unknown" and all(answers.get(name) == "right" for name in NEEDED):
        answer = "right"
    notes = []
    if len(of.one) != len(of.other):
        notes.append(f"the first is of {len(of.one)} ranks, the second of {len(of.other)}")
    divergence = first_divergence(findings)
    return DiffResults(str(first), str(second), of.steps, answer, findings, divergence, notes, resumed_at)


def _ranks(folder: Path) -> list[ScriptRecord]:
    if not (folder / PLAN).is_file():
        kind = "holds no record of samestep check" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {kind}; give two folders that samestep check has written (--out)")
    read(ScriptPlan, folder / PLAN)
    ranks = [read(ScriptRecord, file) for file in rank_files(folder)]
    if not ranks or len(ranks) != ranks[0].size:
        size = ranks[0].size if ranks else "its"
        raise UserError(f"{folder} has the records of {len(ranks)} of {size} ranks; run samestep check again")
    return ranks
