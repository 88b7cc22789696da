"""The rows of tests/scripts.md, what is counted of them, and how they are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from recorder.public_scripts.case import Case, Plant

PAGE = Path(__file__).parents[1] / "scripts.md"
BEGIN = "<!-- written by tests/recorder/public.py from here on -->\n"


@dataclass(frozen=True)
class Row:
    """What one check said of a script. fault: '' for the script as it is, '(edited)' for the one that is planted in.

    cause: that of the first divergence; without one, the warnings. unknown: the questions without an answer, and why.
    named: whether question and cause are those of the fault.
    """

    script: str
    fault: str
    answer: str
    question: str
    step: int | None
    cause: str
    unknown: str
    caught: bool
    named: bool
    seconds: float

    @property
    def is_healthy(self) -> bool:
        return self.fault in ("", "(edited)")

    def is_expected(self, case: Case) -> bool:
        """Whether a script without a planted fault has the answer that is right to say of it."""
        if self.fault:
            return self.answer == "right"
        return self.answer == case.answer and case.why in self.cause + self.unknown

    def is_wrong(self, case: Case) -> bool:
        return not (self.is_expected(case) if self.is_healthy else self.caught)

    def line(self, case: Case, fault: Plant | None) -> str:
        right = self.named if fault else self.is_expected(case)
        said = f"{self.answer} {self.question} {'' if self.step is None else self.step}"
        rest = " | ".join([self.cause, self.unknown])
        return f"{' ' if right else '!'} {self.script} | {self.fault} | {said} | {self.seconds} s | {rest}"


def summary(cases: Sequence[Case], rows: Sequence[Row]) -> str:
    of = {case.name: case for case in cases}
    healthy, faults = [row for row in rows if row.is_healthy], [row for row in rows if not row.is_healthy]
    alarms = [row for row in healthy if row.answer == "differs" and not row.is_expected(of[row.script])]
    return (
        f"{len({row.script for row in rows})} public scripts: {len(alarms)} false alarms; {len(faults)} plantings: "
        f"{sum(row.caught for row in faults)} caught, {sum(row.named for row in faults)} rightly named"
    )


def merged(cases: Sequence[Case], rows: Sequence[Row], record: Path) -> list[Row]:
    """Returns the rows with those that a record holds of other scripts and faults, in the order of the cases."""
    kept = [Row(**each) for each in json.loads(record.read_text())] if record.exists() else []
    of = {(row.script, row.fault): row for row in [*kept, *rows]}
    order = [(c.name, name) for c in cases for name in ("", "(edited)", *(each.name for each in c.plants))]
    return [of[key] for key in order if key in of]


def written(cases: Sequence[Case], rows: Sequence[Row], out: Path) -> None:
    """Writes the record, and the tables of the page below its mark."""
    out.mkdir(parents=True, exist_ok=True)
    rows = merged(cases, rows, out / "rows.json")
    (out / "rows.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    head = PAGE.read_text().partition(BEGIN)[0] if PAGE.exists() else ""
    PAGE.write_text(
        head + BEGIN + "\n".join(["", f"**{summary(cases, rows)}.**", "", *_scripts(cases, rows), *_faults(rows)])
    )


def _scripts(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    lines = ["| script | source | how it is run | as it is | edited | faults: caught, named |", "|---" * 6 + "|"]
    for case in cases:
        of = [row for row in rows if row.script == case.name]
        if not of:
            continue
        link = f"[{case.repo} {case.script}](https://github.com/{case.repo}/blob/{case.commit}/{case.script})"
        plants = [row for row in of if not row.is_healthy]
        score = f"{len(plants)}: {sum(r.caught for r in plants)}, {sum(r.named for r in plants)}" if plants else ""
        said = {row.fault: _said(row) for row in of if row.is_healthy}
        small = "numbers of its text made small" if case.sizes else ""
        how = "; ".join(filter(None, [_how(case), small, case.note]))
        lines.append(f"| {case.name} | {link} | {how} | {said.get('', '')} | {said.get('(edited)', '')} | {score} |")
    return lines


def _how(case: Case) -> str:
    module = ["-m", case.module] if case.module else []
    words = " ".join([*case.command, *module, *case.arguments])
    stands = [*(["CUDA's names are the CPU"] if case.on_gpus else [])]
    stands += [*(["small new models and tokenizers for the hub's"] if "hub" in case.before else [])]
    stands += [f"stand-ins for {', '.join(case.packages)}"] * bool(case.packages)
    env = [f"{key}={value}" for key, value in case.env]
    return "; ".join(filter(None, [f"`{words}`" if words else "", *env, *stands]))


def _said(row: Row) -> str:
    if row.answer == "differs":
        return f"differs: {row.question}: {_cell(row.cause)}"
    if row.answer == "right":
        return f"right; {_cell(row.cause)}" if row.cause else "right"
    return f"{row.answer}: {_cell(row.unknown or row.cause)}"


def _faults(rows: Sequence[Row]) -> list[str]:
    lines = ["", "| script | fault | answer | found in | at step | named | cause, or why not |", "|---" * 7 + "|"]
    for row in rows:
        if not row.is_healthy:
            step, named = "" if row.step is None else row.step, "yes" if row.named else "no"
            why = _cell(row.cause or row.unknown)
            lines.append(f"| {row.script} | {row.fault} | {row.answer} | {row.question} | {step} | {named} | {why} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return shorten(text.replace("|", "/"), 160, placeholder=" …")
