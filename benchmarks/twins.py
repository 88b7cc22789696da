"""Checks healthy scripts, and the same with planted faults, by the real command; says what is right and what is not.

    python benchmarks/twins.py [--only WORDS] [--out FOLDER] [--nproc 2] [--until HH:MM] [--plain]

Each twin (tests/twins) is checked by `samestep check --json` in a folder of its own. A healthy one is right where the
command exits with 0, answers 'right', and warns of nothing. A faulty one is caught where something differs, is warned
of, or ends with the reason; it is named where a finding has the fault's id, or answers a question of the fault in a
sentence that names it; its line is given where a finding has the faulty line among its sites, or the reason has it as
FILE:LINE.

--out keeps a line of twins.jsonl for each twin, and the table. Twins that are kept there are not checked again, so that
a record can be made in pieces. --plain runs the twins without the command, to their end, and compares what a fault
changes. Exit code 1 where a twin is not right.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "twins"))
from corpus import FAULTS, HEALTHY
from corpus.healthy import STARTS_RANKS_ITSELF, STEPS, ranks_of
from corpus.judge import Row, judged, judged_again, said, table_of
from corpus.twin import SCRIPTS, Fault, Healthy, Twin, file_of, text_of

from budget import budget
from fork_servers import fork_servers
from user_command import end_processes, ended

RECORD, TABLE, PLAIN = "twins.jsonl", "table.md", "plain.jsonl"
HANGS = 180  # imports of torch, in whose time a check that has not ended counts as hanging
STALL_S = "25"  # of the command's own watch over a silent training


def planted(twin: Twin, folder: Path) -> Path:
    """Writes a twin and the files beside it; returns the script's path."""
    relative = file_of(twin.script)
    if relative.parent == Path():
        script = folder / relative.name
    else:
        shutil.copytree(SCRIPTS / relative.parts[0], folder / relative.parts[0])
        script = folder / relative
    script.write_text(text_of(twin))
    return script


def words_of(twin: Twin, script: Path, out: Path, nproc: int) -> list[str]:
    """Returns what is typed after `samestep`, in the script's folder."""
    steps = ["--steps", str(STEPS[twin.script])] if twin.script in STEPS else []
    options = ["--nproc", str(nproc), "--launcher", "fork", "--json", "--stall", STALL_S, *steps]
    return ["check", *options, "--out", str(out), script.name, *twin.arguments.split()]


def checked(twin: Twin, nproc: int) -> Row:
    """Checks a twin in a folder of its own, and ends what a check that hangs has left."""
    with tempfile.TemporaryDirectory(prefix="samestep-twin-") as temporary:
        folder = Path(temporary)
        script = planted(twin, folder)
        words = words_of(twin, script, folder / "record", nproc)
        began = time.monotonic()
        done = ended(words, folder, cwd=script.parent, limit_s=budget(HANGS))
        return judged(twin, done.code, done.output, done.error, round(time.monotonic() - began, 1))


def kept(record: Path | None) -> list[Row]:
    if record is None or not record.exists():
        return []
    rows = [Row(**json.loads(line)) for line in record.read_text().splitlines()]
    faults = {fault.name: fault for fault in FAULTS}
    return [judged_again(row, faults[row.twin]) if row.twin in faults else row for row in rows]


def run_plain(twins: Iterable[Twin], nproc: int, record: Path | None) -> int:
    """Runs twins without the command, and says whether each fault changes what its script prints. Returns how many do
    not what they should."""
    from corpus import plain

    done = [json.loads(line) for line in record.read_text().splitlines()] if record and record.exists() else []
    printed = {row["twin"]: row["printed"] for row in done if not row["kind"]}
    wrong, known = 0, {row["twin"] for row in done}
    for twin in twins:
        if twin.name in known:
            continue
        with tempfile.TemporaryDirectory(prefix="samestep-twin-") as folder:
            script = planted(twin, Path(folder))
            started = 1 if twin.script in STARTS_RANKS_ITSELF else ranks_of(twin, nproc)
            outputs, end = plain.run(script, twin.arguments.split(), started, limit_s=40)
            outputs = [told(output) for output in outputs]
            end_processes(Path(folder))
        if isinstance(twin, Fault):
            changes = end != "ended" or outputs != printed.get(Healthy(twin.script, twin.arguments).name)
            as_it_should = changes if twin.harm in ("weights", "metric", "ends") else end == "ended"
        else:
            printed[twin.name] = outputs
            as_it_should = end == "ended"
        wrong += not as_it_should
        print("  " if as_it_should else "! ", twin.name, "|", end, "|", " / ".join(o[-160:].strip() for o in outputs))
        sys.stdout.flush()
        row = {"twin": twin.name, "kind": getattr(twin, "kind", ""), "end": end, "as_it_should": as_it_should}
        if record:
            with record.open("a") as file:
                file.write(json.dumps({**row, "printed": outputs}) + "\n")
    return wrong


def told(output: str) -> str:
    """Returns what a script says of its training; where it says nothing, the end of its output, as of an error."""
    lines = [line for line in output.splitlines() if re.match(r"rank \d|epoch \d|step \d|baseline", line)]
    return "\n".join(lines) or output[-600:]


def in_time(twins: Sequence[Twin], until: str) -> Iterator[Twin]:
    """Yields the twins that begin before a time of the day."""
    for twin in twins:
        if until and time.strftime("%H:%M") >= until and int(until[:2]) == int(time.strftime("%H")):
            print(f"it is {until}: the others are left out")
            return
        yield twin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="twins whose names match this expression")
    parser.add_argument("--out", type=Path, help="keep a line for each twin, and the table")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--until", default="", help="begin no check after this time, HH:MM")
    parser.add_argument("--plain", action="store_true", help="run the twins without the command")
    options = parser.parse_args()
    twins = [twin for twin in (*HEALTHY, *FAULTS) if re.search(options.only, twin.name)]
    if not twins:
        parser.error(f"--only {options.only}: no twin matches")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.plain:
        plain = options.out / PLAIN if options.out else None
        return int(run_plain(in_time(twins, options.until), options.nproc, plain) > 0)
    record = options.out / RECORD if options.out else None
    rows = {row.twin: row for row in kept(record)}
    with fork_servers():
        for twin in in_time([twin for twin in twins if twin.name not in rows], options.until):
            rows[twin.name] = row = checked(twin, ranks_of(twin, options.nproc))
            print(
                "  " if row.right else "! ", row.twin, "|", row.answer, row.exit_code, f"{row.seconds} s |", said(row)
            )
            sys.stdout.flush()
            if record:
                with record.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    listed = [rows[twin.name] for twin in (*HEALTHY, *FAULTS) if twin.name in rows]
    print(table_of(listed).partition("\n\n")[0])
    print(Counter(row.answer for row in listed))
    if options.out:
        (options.out / TABLE).write_text(table_of(listed))
    return int(not all(row.right for row in listed))


if __name__ == "__main__":
    raise SystemExit(main())
