"""python -m samestep.commands.judge_records FOLDER: judges the records of samestep.watch, and prints the answers."""

from __future__ import annotations

import sys
from pathlib import Path

from samestep.proof.script import judge
from samestep.records.files import read, write
from samestep.records.record import Record
from samestep.records.results import RESULTS
from samestep.records.script import PLAN, CheckResults, ScriptPlan, ScriptRecord
from samestep.report.check import show_check


def judge_records(folder: Path) -> CheckResults:
    """Judges what all ranks of a plan have recorded. Writes results.json beside the records."""
    plan = read(ScriptPlan, folder / PLAN)
    ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(plan.ranks)]
    results = judge(plan, ranks, Record(folder))
    write(folder / RESULTS, results)
    return results


if __name__ == "__main__":
    show_check(judge_records(Path(sys.argv[1])))
