"""Judges records that are there already: those of samestep.watch, or two that samestep check has kept.

python -m samestep.commands.judge_records FOLDER    judges the records of samestep.watch, and prints the answers
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from samestep.commands.user_sources import declared_in, read_sources
from samestep.errors import UserError
from samestep.judge import first_divergence, judge, with_coefficients, with_sites
from samestep.judge.diff import answer_of, compare_records
from samestep.judge.findings import common_steps
from samestep.judge.record_pair import RecordPair
from samestep.judge.sites import files_of
from samestep.message import message
from samestep.records.files import read, write
from samestep.records.findings import CheckResults, DiffResults
from samestep.records.record import Record, rank_files
from samestep.records.results import RESULTS
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import PLAN, ScriptPlan
from samestep.report.check import show_check
from samestep.report.language import with_english


def judge_records(folder: Path) -> CheckResults:
    """Judges what all ranks of a plan have recorded. Writes results.json beside the records."""
    plan = read(ScriptPlan, folder / PLAN)
    ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(plan.ranks)]
    sources = read_sources(files_of(ranks))
    plan = replace(plan, meant=plan.meant or declared_in(sources))
    judged = with_coefficients(judge(plan, ranks, Record(folder)), ranks, sources)
    results = with_english(with_sites(judged, ranks, sources, Path.cwd()))
    write(folder / RESULTS, results)
    return results


def diff(first: Path, second: Path, resumed_at: int = 0) -> DiffResults:
    """Compares two folders of records; the first is what is expected.

    resumed_at: steps of the first before the checkpoint with which the second began. Raises UserError for a folder that
    is none, and where the first has no step after the checkpoint.
    """
    pair = RecordPair(_ranks(first), _ranks(second), Record(first), Record(second), resumed_at)
    taken = len(common_steps(pair.first))
    if resumed_at and taken <= resumed_at:
        raise UserError(
            f"--resumed-at {resumed_at}: {first} has {taken} steps, and none after the checkpoint; record more of them "
            "(samestep check --steps)"
        )
    findings, sizes = compare_records(pair), (len(pair.first), len(pair.second))
    results = DiffResults(
        first=str(first),
        second=str(second),
        steps=pair.steps,
        answer=answer_of(findings),
        findings=findings,
        first_divergence=first_divergence(findings),
        notes=[message("records_of_other_ranks", first=sizes[0], second=sizes[1])] if len({*sizes}) > 1 else [],
        resumed_at=resumed_at,
    )
    return with_english(results)


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


if __name__ == "__main__":
    show_check(judge_records(Path(sys.argv[1])))
