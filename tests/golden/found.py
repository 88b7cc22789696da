"""What samestep says of a case, without what a machine adds to it; which cases are drawn; and two runs compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from messages import ids
from samestep.message import Message
from samestep.records.call_site import CallSite
from samestep.records.findings import CheckResults, DiffResults, Finding, question_of
from samestep.records.results import CompareResults, Verdict

TENTH, LARGE = 0.1, 10
FIELDS = ("answer", "code", "first", "findings")


@dataclass(frozen=True)
class Found:
    """What was said of a case. code: the exit code; None where there is no command, or it hangs.

    first: the question, or the quantity, that differs first, and the step. findings: those that are not right: the
    question, the answer, the ids, and the lines of the user's files that it points at; of a proof, the causes.
    """

    case: str
    answer: str
    code: int | None
    first: str = ""
    findings: list[str] = field(default_factory=list)


def found_of_check(case: str, code: int | None, results: CheckResults | DiffResults, folders: Sequence[Path]) -> Found:
    """Returns what `check` and `diff` have said. folders: those of the user's files."""
    first = results.first_divergence
    differs = at_step(question_of(results), first.step) if first else ""
    told = [told_finding(finding, folders) for finding in results.findings if finding.answer != "right"]
    return Found(case, results.answer, code, first=differs, findings=sorted(told))


def told_finding(finding: Finding, folders: Sequence[Path]) -> str:
    """Returns a finding in one line."""
    words = [finding.question, finding.answer, *named(finding.message), *lines_of(finding.sites, folders)]
    expected = lines_of(finding.expected_sites, folders)
    return " ".join([*words, *(["instead of", *expected] if expected else [])])


def lines_of(sites: Iterable[CallSite], folders: Sequence[Path]) -> list[str]:
    """Returns FILE:LINE of the sites in these folders. A side of `--against` stands before the file's name there."""
    lines = []
    for site in sites:
        side, _, file = site.file.rpartition(":")
        inside = [folder for folder in folders if Path(file).is_relative_to(folder)]
        if side or inside:
            path = Path(file).relative_to(inside[0]) if inside else file
            lines.append(f"{side}:{path}:{site.line}".lstrip(":"))
    return lines


def found_of_verdict(case: str, code: int | None, verdict: Verdict) -> Found:
    """Returns what a proof of one engine has said."""
    first = verdict.first_divergence
    causes = named(first.cause) if first else named(verdict.reason)
    origin = verdict.origin.said if verdict.origin else ()
    findings = [" ".join(["cause", *causes])] if causes else []
    findings += [" ".join(["origin", *named(said)]) for said in origin]
    differs = at_step(f"{first.training}: {first.quantity}", first.step) if first else ""
    return Found(case, verdict.verdict, code, first=differs, findings=findings)


def found_of_one_process(case: str, code: int | None, results: CompareResults) -> Found:
    """Returns whether ranks train a job as one process does."""
    alone = results.same_as_one_process
    if alone is None:
        return found_of_verdict(case, code, results.engines[0])
    causes = named(alone.reason)
    return Found(case, alone.answer, code, findings=[" ".join(["cause", *causes])] if causes else [])


def found_of_failure(case: str, code: int | None, reason: Message | None, error: str, files: Iterable[str]) -> Found:
    """Returns why a command has no results: the ids of its reason, and the lines of the user's files that it names."""
    lines = [f"{name}:{line}" for name, line in re.findall(r"([\w.-]+\.py)(?::|\", line )(\d+)", error)]
    users = {*files}
    told = [*named(reason), *dict.fromkeys(line for line in lines if line.partition(":")[0] in users)]
    findings = [" ".join(["reason", *told])] if told else []
    return Found(case, "hangs" if code is None else "failed", code, findings=findings)


def named(message: Message | None) -> list[str]:
    """Returns the id of a message, then those in it."""
    return [message.id, *sorted(ids(message) - {message.id})] if message else []


def at_step(what: str, step: int | None) -> str:
    return what if step is None else f"{what} at step {step}"


def share_of(name: str) -> float:
    """Returns a number from 0 to 1 that follows from the name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12


def drawn(groups: Mapping[str, str], share: float = TENTH) -> set[str]:
    """Draws a share of the cases, and at least one of each group of ten or more. groups: of each case.

    A case is drawn by its own name: another one that comes moves none, but where it takes the place of the one that
    stands for its group.
    """
    chosen = {name for name in groups if share_of(name) < share}
    large = {group for group, count in Counter(groups.values()).items() if count >= LARGE}
    for group in large - {groups[name] for name in chosen}:
        chosen.add(min((name for name in groups if groups[name] == group), key=share_of))
    return chosen


@dataclass(frozen=True)
class Difference:
    case: str
    what: str
    was: str
    is_now: str


def differences(expected: Mapping[str, Found], found: Mapping[str, Found], known: Iterable[str]) -> list[Difference]:
    """Returns where found values differ from the expected ones. known: all cases that there are now."""
    rows = []
    for name, now in found.items():
        if name not in expected:
            rows.append(Difference(name, "new", "", shown(now)))
            continue
        was = expected[name]
        for what in FIELDS:
            if getattr(was, what) != getattr(now, what):
                rows.append(Difference(name, what, text_of(was, what), text_of(now, what)))
    gone = sorted(expected.keys() - {*known})
    return rows + [Difference(name, "gone", shown(expected[name]), "") for name in gone]


def text_of(found: Found, what: str) -> str:
    value = getattr(found, what)
    return "; ".join(value) if isinstance(value, list) else str(value)


def shown(found: Found) -> str:
    return " | ".join(text_of(found, what) for what in FIELDS)


def table(rows: Sequence[Difference]) -> str:
    """Returns the differences as one table."""
    lines = ["| case | what | was | is |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.case} | {row.what} | {row.was} | {row.is_now} |" for row in rows)])


def counts(expected: Mapping[str, Found], found: Mapping[str, Found], rows: Sequence[Difference], skipped: int) -> str:
    new, gone = ({row.case for row in rows if row.what == what} for what in ("new", "gone"))
    changed = {row.case for row in rows} - new - gone
    unchanged = len(found) - len(new) - len(changed)
    return f"{unchanged} unchanged, {len(changed)} changed, {len(new)} new, {len(gone)} gone, {skipped} skipped"


def line_of(found: Found) -> str:
    return json.dumps(asdict(found)) + "\n"


def read_all(file: Path) -> dict[str, Found]:
    """Reads a file with a line for each case."""
    if not file.exists():
        return {}
    return {found.case: found for found in (Found(**json.loads(line)) for line in file.read_text().splitlines())}


def write_all(cases: Mapping[str, Found], file: Path) -> None:
    file.write_text("".join(line_of(cases[name]) for name in sorted(cases)))
