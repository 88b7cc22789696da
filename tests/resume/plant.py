"""Plants every fault of a resume, one at a time, and prints which of them the proof rejects and names rightly.

    python tests/resume/plant.py [--out FOLDER] [--only WORDS]

Exit 0 when every fault is rejected and rightly named. `--out` keeps every row in rows.json, and writes the table of
docs/resume.md again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from messages import explains, ids
from mutations.plant import patched
from ranks import Ranks, RanksFailed, engine_facts, resumed, resumed_reference_plan
from resume.faults import FAULTS, ResumeFault
from samestep.records.inspection import EngineFacts
from samestep.records.record import Record

DOCS = Path(__file__).parents[2] / "docs" / "resume.md"
CONFORMANCE = Path(__file__).parents[1] / "conformance"
JOBS = {
    "alike": f"{CONFORMANCE}/jobs_resumed.py:alike",
    "stateful": f"{CONFORMANCE}/jobs_resumed.py:stateful",
    "gan": f"{CONFORMANCE}/jobs_phases.py:gan",
    "lstm": f"{CONFORMANCE}/jobs_carried.py:lstm",
    "drawn": f"{CONFORMANCE}/jobs_drawn.py:job",
    "plain": f"{Path(__file__).parent}/jobs_interrupted.py:plain",
    "hidden": f"{Path(__file__).parent}/jobs_interrupted.py:hidden",
}


class References:
    """Plays the reference of each job and pair of layouts once, with the unpatched package."""

    def __init__(self, reference_rank: Ranks) -> None:
        self.reference_rank = reference_rank

    def of(self, fault: ResumeFault) -> Record:
        plan = resumed_reference_plan(JOBS[fault.job], *facts_of(fault), fault.settings)
        return self.reference_rank.played(plan)


def facts_of(fault: ResumeFault) -> tuple[EngineFacts, EngineFacts]:
    """The engine that begins the training, and the one that continues it."""
    return engine_facts(*fault.first, fault.engine_settings), engine_facts(*fault.then, fault.engine_settings)


def plant(fault: ResumeFault, references: References) -> dict[str, Any]:
    """What the proof says about one fault."""
    (engine, size), (other, other_size) = fault.first, fault.then
    row: dict[str, Any] = {"fault": fault.name, "file": fault.file, "job": fault.job, "trainparity": fault.trainparity}
    row |= {"pair": f"{engine} {size} -> {other} {other_size}"}
    reference = references.of(fault)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source = patched(fault, Path(folder))
        ranks = stack.enter_context(Ranks(size, source))
        others = ranks if size == other_size else stack.enter_context(Ranks(other_size, source))
        facts = facts_of(fault)
        try:
            verdict = resumed(reference, JOBS[fault.job], (ranks, facts[0]), (others, facts[1]), fault.settings)
        except RanksFailed as error:
            return row | {"verdict": "failed", "named": False, "explained": False, "reason": str(error)[-300:]}
    first = verdict.first_divergence
    if first is None:
        return row | {"verdict": verdict.verdict, "named": False, "explained": False}
    shown = ("training", "quantity", "step", "tensor", "expected", "found")
    return row | {
        "verdict": verdict.verdict,
        "named": first.quantity in fault.named,
        "explained": explains(first.cause, fault.cause),
        "cause": str(first.cause),
        "ids": sorted(ids(first.cause)),
        **{key: getattr(first, key) for key in shown},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    caught = sum(row["verdict"] == "differs" for row in rows)
    named, explained = (sum(row[what] for row in rows) for what in ("named", "explained"))
    return f"{len(rows)} faults: {caught} caught, {named} rightly named, {explained} with the right cause"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a fault: where it is planted, between which engines, and what the proof says of it."""
    lines = ["| fault | planted in | pair | named as | cause |", "|---" * 5 + "|"]
    for row in rows:
        what = str(row.get("quantity")) + (f" of {row['tensor']}" if row.get("tensor") else "")
        cause = str(row.get("cause", row["verdict"])).replace("|", "/")
        lines.append(f"| {row['fault']} | `{row['file']}` | {row['pair']} | {what.replace('|', '/')} | {cause} |")
    return "\n".join(lines)


def with_table(docs: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The text `docs`, with its table of faults and its counts made those of `rows`."""
    docs = re.sub(r"\*\*\d+ faults: .*?\*\*", f"**{summary(rows)}.**", docs)
    return re.sub(r"\| fault \| planted in .*?\n(?=\n)", lambda _: markdown(rows) + "\n", docs, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep every row in this folder, and write the table of the docs")
    parser.add_argument("--only", default="", help="faults with these words in their name")
    options = parser.parse_args()
    rows = []
    with Ranks(1) as reference_rank:
        references = References(reference_rank)
        for fault in (fault for fault in FAULTS if options.only in fault.name):
            row = plant(fault, references)
            rows.append(row)
            mark = "ok" if row["named"] and row["explained"] else "NOT"
            print(f"{mark:3} {row['fault']}: {row['verdict']} {row.get('quantity')} {row.get('cause')}", flush=True)
            if mark == "NOT":
                print(row, flush=True)
    print(summary(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
        DOCS.write_text(with_table(DOCS.read_text(), rows))
    return 0 if all(row["named"] and row["explained"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
