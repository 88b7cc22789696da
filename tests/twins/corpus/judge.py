"""Judges what `samestep check --json` says of a twin: a healthy one is right, a fault is caught, named and located."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from textwrap import shorten
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
    shown = [finding | {"divergence": None} for finding in findings]  # which repeats the finding
    common = {"answer": answer, "exit_code": exit_code, "end": "ended" if exit_code is not None else "hangs"}
    common |= {"seconds": seconds, "findings": shown, "error": error.strip()[-1500:]}
    if not isinstance(twin, Fault):
        right = exit_code == 0 and answer == "right" and not told
        return Row(twin.name, "", caught=bool(told), named=False, located=False, right=right, **common)
    reasons = error if answer == "failed" and exit_code == 1 else ""  # 2 is a mistake in the command itself
    caught = bool(told) or bool(reasons)
    named = is_named(twin, told, reasons)
    file, line = file_of(twin.script).name, line_of(twin)
    sites = [site for finding in told for site in finding.get("sites", [])]
    located = any(PurePath(site["file"]).name == file and site["line"] == line for site in sites)
    located |= bool(re.search(rf"{re.escape(f'{file}:{line}')}\b", json.dumps(told) + reasons))
    return Row(twin.name, twin.kind, caught=caught, named=named, located=located, right=named and located, **common)


def judged_again(row: Row, fault: Fault) -> Row:
    """Returns a row that was kept, named by the fault's present questions and words."""
    told = [finding for finding in row.findings if finding["answer"] in ("differs", "warning")]
    return replace(row, named=is_named(fault, told, row.error if row.answer == "failed" else ""))


def is_named(fault: Fault, told: Sequence[dict[str, Any]], reasons: str) -> bool:
    """Whether a finding names a fault, or the reasons why the command has failed do."""
    return any(names(fault, finding) for finding in told) or bool(re.search(fault.words, " ".join(reasons.split())))


def names(fault: Fault, finding: dict[str, Any]) -> bool:
    """Whether a finding names a fault."""
    if fault.kind in values_of(finding, "id"):
        return True
    sentences = " ".join([*values_of(finding, "sentence"), *values_of(finding, "english")])
    return finding["question"] in fault.questions and bool(re.search(fault.words, sentences))


def values_of(tree: Any, key: str) -> list[str]:
    """Returns the strings that stand under a key anywhere in a value of JSON: a finding may hold messages with ids."""
    if isinstance(tree, list):
        return [value for branch in tree for value in values_of(branch, key)]
    if not isinstance(tree, dict):
        return []
    here = [tree[key]] if isinstance(tree.get(key), str) else []
    return here + [value for branch in tree.values() for value in values_of(branch, key)]


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
    parts = []
    for finding in row.findings:
        sentence = " ".join(values_of(finding, "sentence") or values_of(finding, "english"))
        parts.append(f"{finding['question']} {finding['answer']}: {shorten(sentence, 150, placeholder=' …')}")
    if not parts and row.error:
        parts = [" ".join(row.error.split())[-200:]]
    return "; ".join(parts[:3]).replace("|", "\\|")
