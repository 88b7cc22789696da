"""Judges what `samestep check --json` says of a twin: a healthy one is right, a fault is caught, named and located."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from corpus.twin import Fault, Twin, file_of, line_of


@dataclass(frozen=True)
class Row:
    """What one check said. findings: those that are not right. end: 'ended' or 'hangs'. error: what stderr says."""

    twin: str
    kind: str
    answer: str
    exit_code: int | None
    end: str
    caught: bool
    named: bool
    located: bool
    right: bool
    seconds: float
    findings: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def judged(twin: Twin, exit_code: int | None, output: str, error: str, seconds: float) -> Row:
    """Returns the row of what the command has said."""
    try:
        results = json.loads(output)
    except json.JSONDecodeError:
        results = {}
    findings = [finding for finding in results.get("findings", []) if finding["answer"] != "right"]
    answer = results.get("answer") or ("failed" if exit_code is not None else "hangs")
    told = [finding for finding in findings if finding["answer"] in ("differs", "warning")]
    shown = [
        {"question": f["question"], "answer": f["answer"], "id": f.get("id"), "sentence": f["sentence"]}
        for f in findings
    ]
    common = {"answer": answer, "exit_code": exit_code, "end": "ended" if exit_code is not None else "hangs"}
    common |= {"seconds": seconds, "findings": shown, "error": error.strip()[-1500:]}
    if not isinstance(twin, Fault):
        right = exit_code == 0 and answer == "right" and not told
        return Row(twin.name, "", caught=bool(told), named=False, located=False, right=right, **common)
    reasons = error if answer == "failed" else ""
    caught = bool(told) or bool(reasons)
    named = any(names(twin, finding) for finding in told) or bool(re.search(twin.words, " ".join(reasons.split())))
    place = f"{file_of(twin.script).name}:{line_of(twin)}"
    located = bool(re.search(rf"{re.escape(place)}\b", json.dumps(told) + reasons))
    return Row(twin.name, twin.kind, caught=caught, named=named, located=located, right=named and located, **common)


def names(fault: Fault, finding: dict[str, Any]) -> bool:
    """Whether a finding names a fault."""
    if finding.get("id") == fault.kind:
        return True
    return finding["question"] in fault.questions and bool(re.search(fault.words, finding["sentence"]))


def table_of(rows: Sequence[Row]) -> str:
    """Returns the counts, and each twin that is not right with what was said of it."""
    healthy, faulty = [row for row in rows if not row.kind], [row for row in rows if row.kind]
    lines = ["| twins | checked | right answer | named | line given |", "|---|---|---|---|---|"]
    lines.append(f"| healthy | {len(healthy)} | {sum(row.right for row in healthy)} | | |")
    counts = [sum(getattr(row, what) for row in faulty) for what in ("caught", "named", "located")]
    lines.append(f"| faulty | {len(faulty)} | {counts[0]} | {counts[1]} | {counts[2]} |")
    lines += ["", "| healthy twin that is not right | answer | exit | what was said |", "|---|---|---|---|"]
    lines += [f"| {row.twin} | {row.answer} | {row.exit_code} | {said(row)} |" for row in healthy if not row.right]
    lines += ["", "| faulty twin | answer | caught | named | line | what was said |", "|---" * 6 + "|"]
    for row in faulty:
        caught, named, located = ("yes" if what else "no" for what in (row.caught, row.named, row.located))
        lines.append(f"| {row.twin} | {row.answer} | {caught} | {named} | {located} | {said(row)} |")
    return "\n".join(lines) + "\n"


def said(row: Row) -> str:
    """Returns the findings that are not right, the first of each answer in short."""
    parts = [f"{f['question']} {f['answer']}: {' '.join(f['sentence'].split())[:150]}" for f in row.findings]
    if not parts and row.error:
        parts = [" ".join(row.error.split())[-200:]]
    return "; ".join(parts[:3]).replace("|", "\\|")
