"""Runs each exhibit's wrong and right version, and prints which bugs are caught and named, and the false alarms.

    python museum/run.py [--only WORDS] [--out FOLDER] [--rest] [--write]

--only: exhibits with one of these words, separated by commas, in their name, class or source. --out: adds each row to
FOLDER/rows.json as it ends, in place of an older one. --rest: runs those alone whose row there is not of this commit,
as after a run that was cut off. --write: writes the table of museum/README.md, and what was said into each
exhibit's README.md, from the record. Exhibits whose pinned packages are not installed (museum/install.py), or whose
library is missing, are skipped and counted. Exit 1 when an exhibit fares worse than in the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from museum.exhibit import PINS, Exhibit, exhibits, pins_folder  # noqa: E402 - a script's folder is on the path when it runs

from fork_servers import fork_servers  # noqa: E402
from samestep.launch.fork_client import SOCKETS  # noqa: E402
from samestep.records.files import from_json  # noqa: E402
from samestep.records.findings import CheckResults, DiffResults, question_of  # noqa: E402
from samestep.records.results import CompareResults  # noqa: E402

RECORD = ROOT / "results" / "museum_2cpu_2026-11-27"
CAUGHT = ("differs", "warning")
STEPS_S = 240  # a command that takes longer is ended


@dataclass(frozen=True)
class Said:
    """What one command said. answer: 'right', 'warning', 'differs', 'unknown' or 'failed'; of a proof also its verdict.

    question: or quantity, that differs first, or that is warned of. step, cause: of it. note: why there is no answer.
    """

    answer: str
    question: str = ""
    step: int | None = None
    cause: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One exhibit, run both ways. alarm: whether the right version was said to differ, or has failed. code: the commit
    that ran it."""

    name: str
    wrong: Said
    right: Said
    caught: bool
    named: bool
    alarm: bool
    seconds: float
    code: str


def run(exhibit: Exhibit) -> Row:
    """Runs both versions of an exhibit."""
    began = time.monotonic()
    wrong, right = said(exhibit, "wrong"), said(exhibit, "right")
    caught = wrong.answer in CAUGHT
    named = caught and is_named(exhibit, wrong)
    return Row(
        exhibit.name,
        wrong,
        right,
        caught,
        named,
        right.answer in (*CAUGHT, "failed"),
        round(time.monotonic() - began, 1),
        commit(),
    )


def commit() -> str:
    """Returns the commit of this code; with '+' where files differ from it."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def is_named(exhibit: Exhibit, wrong: Said) -> bool:
    """Whether the question and the cause are those of the bug. Without words of a cause none is."""
    return wrong.question == exhibit.question and bool(exhibit.cause) and exhibit.cause in wrong.cause


def said(exhibit: Exhibit, version: str) -> Said:
    """Runs one version."""
    with tempfile.TemporaryDirectory(prefix="samestep-museum-") as folder:
        done = ended(exhibit, version, Path(folder))
    if not done.stdout.startswith("{"):
        return Said("failed", note=" ".join((done.stderr or done.stdout).replace(folder, "").split())[-300:])
    results = json.loads(done.stdout)
    if exhibit.command == "verify":
        return _of_proof(results)
    return _of_check(from_json(CheckResults if exhibit.command == "check" else DiffResults, results))


def _of_check(results: CheckResults | DiffResults) -> Said:
    first = results.first_divergence
    warned = next((each for each in results.findings if each.answer == "warning"), None)
    if not first and warned:
        return Said("warning", warned.question, None, str(warned.message))
    if not first:
        unknown = [each for each in results.findings if each.answer == "unknown"]
        return Said(results.answer, note="; ".join(f"{each.question}: {each.message}" for each in unknown))
    return Said(results.answer, question_of(results), first.step, str(first.cause))


def _of_proof(results: object) -> Said:
    (verdict,) = from_json(CompareResults, results).engines
    first = verdict.first_divergence
    answer = "right" if verdict.verdict == "same" else verdict.verdict
    if not first:
        return Said(answer, note=str(verdict.reason or ""))
    return Said(answer, first.quantity, first.step, str(first.cause))


def ended(exhibit: Exhibit, version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command of an exhibit on one version, in this folder; of 'diff' both checks before it."""
    environment = dict(os.environ)
    if exhibit.pins.get(version):  # a server of its own imports the old packages
        environment.pop(SOCKETS, None)
        environment["PYTHONPATH"] = f"{PINS / pins_folder(exhibit, version)}{os.pathsep}{environment['PYTHONPATH']}"
    try:
        for command, *line in _lines(exhibit, version):
            words = [sys.executable, "-m", "samestep", command, "--json", *line]
            done = subprocess.run(words, capture_output=True, text=True, timeout=STEPS_S, env=environment, cwd=folder)
            if not done.stdout.startswith("{"):
                break
        return done
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"ended after {STEPS_S} s")


def _lines(exhibit: Exhibit, version: str) -> list[list[str]]:
    """Returns the lines after `samestep` that are typed one after the other; the last one says what is wrong."""
    options = ["--nproc", str(exhibit.nproc), *exhibit.arguments, "--out"]
    if exhibit.command == "verify":
        job = str(exhibit.folder / "job.py")
        return [["verify", job, "--engines", engine_name(exhibit, version), *options, "out"]]
    script = str(exhibit.file(version))
    first = ["check", "--launcher", "fork", *options, "out", script]
    if exhibit.command == "check":
        return [first]
    second = ["check", "--launcher", "fork", *options, "resumed", script, *exhibit.resumed]
    return [first, second, ["diff", "out", "resumed", "--resumed-at", str(exhibit.resumed_at)]]


def engine_name(exhibit: Exhibit, version: str) -> str:
    return f"{exhibit.name}_{version}"


def lacks(exhibit: Exhibit) -> str:
    """Returns what an exhibit lacks to run here; '' where it can run."""
    if absent := [need for need in exhibit.needs if find_spec(need) is None]:
        return f"{absent[0]} is not installed"
    folders = [pins_folder(exhibit, version) for version in exhibit.pins]
    if absent := [folder for folder in folders if folder and not (PINS / folder).is_dir()]:
        return f"{absent[0]} is not installed: python museum/install.py"
    return ""


@contextmanager
def commands_ready(many: Sequence[Exhibit]) -> Iterator[None]:
    """While it runs, commands find the exhibits' engines, and servers that fork their ranks."""
    with tempfile.TemporaryDirectory(prefix="samestep-museum-") as folder:
        info = Path(folder) / "samestep_museum-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-museum\nVersion: 1.0\n")
        engines = [(each, version) for each in many if each.command == "verify" for version in ("wrong", "right")]
        points = [f"{engine_name(each, version)} = museum.{each.name}.{version}" for each, version in engines]
        (info / "entry_points.txt").write_text("\n".join(["[samestep.engines]", *points, ""]))
        paths = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        try:
            with fork_servers():
                yield
        finally:
            os.environ["PYTHONPATH"] = paths[-1]


def summary(rows: Sequence[Row]) -> str:
    caught, named, alarms = (sum(getattr(row, name) for row in rows) for name in ("caught", "named", "alarm"))
    warned = sum(row.caught and row.wrong.answer == "warning" for row in rows)
    by = f" ({warned} of them by a warning)" * bool(warned)
    return f"{len(rows)} bugs: {caught} caught{by}, {named} rightly named; {alarms} false alarms on the right versions"


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table of museum/README.md."""
    known = {each.name: each for each in exhibits()}
    lines = ["| bug | class | code | published | caught | named | right version | why not |", "|---" * 8 + "|"]
    for row in sorted(rows, key=lambda row: (known[row.name].kind, row.name)):
        of = known[row.name]
        yes = ["yes" if value else "no" for value in (row.caught, row.named)]
        yes[0] = "warned" if row.caught and row.wrong.answer == "warning" else yes[0]
        alarm = "**alarm**" if row.alarm else row.right.answer
        link = f"[{short(of.source)}]({of.source})"
        why = "" if row.named and not row.alarm else of.why
        title = f"[{of.title}]({of.name}/README.md)"
        lines.append(f"| {' | '.join([title, of.kind, of.code, link, *yes, alarm, why])} |")
    return "\n".join(lines)


def short(link: str) -> str:
    """Returns owner/name#number of a GitHub link, and the host of another one."""
    found = re.fullmatch(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", link)
    return f"{found[1]}#{found[2]}" if found else re.sub(r"https?://(?:www\.)?([^/]+)/.*", r"\1", link)


def sentence(file: str, what: Said) -> str:
    """Returns what was said of one version, as the exhibit's README shows it."""
    if what.answer in CAUGHT:
        step = "" if what.step is None else f" at step {what.step}"
        return f"- `{file}`: **{what.answer}**{step}, {what.question}: {what.cause}"
    return f"- `{file}`: **{what.answer}**" + (f" ({what.note})" if what.note and what.answer != "right" else "")


def shown(exhibit: Exhibit, row: Row) -> str:
    """Returns the last section of an exhibit's README."""
    names = {version: f"{version}.py" for version in ("wrong", "right")}
    if exhibit.pins:
        names = {version: f"train.py, {(exhibit.pins[version] or ['the latest version'])[0]}" for version in names}
    words = " ".join(exhibit.arguments)
    typed = f"samestep check --nproc {exhibit.nproc} {words}".rstrip() + f" museum/{exhibit.name}/"
    if exhibit.pins or exhibit.command == "verify":
        typed = f"python museum/run.py --only {exhibit.name}"
    else:
        typed += "wrong.py"
    lines = ["## What samestep says", "", f"    {typed}", ""]
    lines += [sentence(names["wrong"], row.wrong), sentence(names["right"], row.right), ""]
    if exhibit.why and not (row.named and not row.alarm):
        lines += [f"Why: {exhibit.why}.", ""]
    return "\n".join(lines)


def kept(folder: Path = RECORD) -> list[Row]:
    """Returns the rows of a record."""
    path = folder / "rows.json"
    return [from_json(Row, each) for each in json.loads(path.read_text())] if path.exists() else []


def keep(row: Row, folder: Path) -> None:
    """Adds a row to a record, in place of an older one. Rows of exhibits that are gone are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {each.name: each for each in (*kept(folder), row)}
    here = {each.name for each in exhibits()}
    text = json.dumps([dataclasses.asdict(rows[name]) for name in sorted(rows) if name in here], indent=1)
    unfinished = folder / "rows.json.unfinished"
    unfinished.write_text(text + "\n")
    unfinished.replace(folder / "rows.json")


def write(rows: Sequence[Row]) -> None:
    """Writes the tables of the READMEs."""
    readme = HERE / "README.md"
    text = re.sub(r"\*\*\d+ bugs: .*?\*\*", f"**{summary(rows)}.**", readme.read_text())
    readme.write_text(re.sub(r"\| bug \| .*?\n(?=\n|$)", lambda _: markdown(rows) + "\n", text, flags=re.S))
    known = {each.name: each for each in exhibits()}
    for row in rows:
        file = known[row.name].folder / "README.md"
        before = file.read_text().partition("## What samestep says")[0]
        file.write_text(before + shown(known[row.name], row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="exhibits with one of these words, separated by commas")
    parser.add_argument("--out", type=Path, help="add the rows to this folder's rows.json")
    parser.add_argument("--rest", action="store_true", help="not those whose row in --out is of this commit")
    parser.add_argument("--write", action="store_true", help="write the tables of the READMEs, from the kept rows")
    options = parser.parse_args()
    words = options.only.split(",")
    many = [each for each in exhibits() if any(word in f"{each.name} {each.kind} {each.source}" for word in words)]
    if not many:
        parser.error(f"--only {options.only}: no exhibit has one of these words in its name, class or source")
    if options.rest and not options.out:
        parser.error("--rest needs --out, the folder whose rows it completes")
    if options.rest:
        done = {row.name for row in kept(options.out) if row.code == commit()}
        many = [each for each in many if each.name not in done]
    skipped = {each.name: why for each in many if (why := lacks(each))}
    rows: list[Row] = []
    before = {row.name: row for row in kept()}
    with commands_ready(many):
        for each in many:
            if each.name in skipped:
                print(f"-  {each.name} | {skipped[each.name]}", flush=True)
                continue
            rows.append(run(each))
            _print(rows[-1])
            if options.out:
                keep(rows[-1], options.out)
    print(summary(rows) + (f"; {len(skipped)} not run" if skipped else ""))
    if options.write:
        write(kept())
        return 0
    return int(any(changed(row, before[row.name]) for row in rows if row.name in before))


def changed(row: Row, before: Row) -> bool:
    """Whether an exhibit fares worse than it did."""
    return (row.caught, row.named, not row.alarm) < (before.caught, before.named, not before.alarm)


def _print(row: Row) -> None:
    mark = "! " if row.alarm else "  " if row.named else "? "
    for version, what in (("wrong", row.wrong), ("right", row.right)):
        found = f"{what.question} {what.step} | {what.cause or what.note[:300]}"
        print(f"{mark} {row.name} {version} | {what.answer} | {found}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
