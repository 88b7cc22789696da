"""Plants every fault, one at a time, and runs `samestep verify` with it: does it reject the fault, and name its cause?

    python tests/mutations/record.py [--out FOLDER] [--ranks 2 3 5] [--only WORDS …] [--at-once 2] [--turns 1]

A planting is what a user would have: one package, with the fault in it, which plays both sides, and the command. Exit 0
when every fault is rejected and rightly named at every number of ranks; each is planted on its jobs in turn. `--turns`
says at how many of the numbers of ranks. `--out` keeps every row in rows.json, goes on where it was cut off, and, of
all faults, writes the table of docs/proof.md again. From 5 ranks on, and in a mesh, these are threads, where the
engine allows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from budget import budget
from mutations.faults import FAULTS, Fault, causes
from mutations.faults.fifth_rank import FAULTS as OF_RANKS_ABOVE
from mutations.faults.fifth_rank import of_ranks_above
from mutations.plant import patched, sizes_of, told
from ranks import SOURCE
from samestep.records.files import read
from samestep.records.results import RESULTS, CompareResults, Verdict

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "proof.md"
THREADED = {"ddp", "fsdp", "zero", "amp"}
AS_THREADS = 5  # so many ranks, or more, are threads
DEADLINE_IMPORTS = 150
REJECTED = ("differs", "failed")  # exit code 1


def command_of(fault: Fault, job: str, size: int) -> list[str]:
    """Returns the command that a user would type, without its --out."""
    settings = [text for name, value in fault.settings.items() for text in ("--set-engine", f"{name}={value}")]
    # Ranks that are threads live no run.
    as_threads = bool(fault.mesh) or (size >= AS_THREADS and fault.engine in THREADED and fault.also != "life")
    threads = ["--as", "threads"] if as_threads else []
    if size >= AS_THREADS and fault.needs == "micro-batches":  # else every rank's rows fit into one
        settings += ["--set", "rows=93", "--set", "global_batch=20"]
    job_file = f"{HERE / 'jobs.py'}:{job}"
    mesh = ["--mesh", fault.mesh] if fault.mesh else []
    options = ["--engine", fault.engine, "--nproc", str(size), *mesh, "--also", "none"]
    return ["verify", job_file, *options, *settings, *threads]


def planted(fault: Fault, job: str, size: int) -> dict[str, Any]:
    """Returns what the command says about one job with the fault in the package."""
    row: dict[str, Any] = {"fault": fault.name, "file": fault.file, "job": job, "ranks": size}
    row |= {"engine": fault.engine, "settings": dict(fault.settings), "command": command_of(fault, job, size)[2:]}
    row["exit_code"], verdict, error = verified(fault, job, size)
    if verdict is None:
        said = (error.strip().splitlines() or ["no output"])[-1]
        return row | {"verdict": "failed", "named": False, "explained": False, "reason": said}
    return row | told(fault, verdict)


def verified(fault: Fault, job: str, size: int) -> tuple[int, Verdict | None, str]:
    """Runs the command with the fault in the package: its exit code, the verdict if there is one, and its errors."""
    with tempfile.TemporaryDirectory(prefix="samestep-planted-") as name:
        folder = Path(name)
        command = command_of(fault, job, size)
        ended = subprocess.run(
            [sys.executable, "-m", "samestep", *command, "--out", str(folder / "results")],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": with_tests(patched(fault, folder))},
            capture_output=True,
            text=True,
            timeout=budget(DEADLINE_IMPORTS),
            check=False,
        )
        file = folder / "results" / RESULTS
        if not file.exists():
            return ended.returncode, None, ended.stderr
        (result,) = (result for result in read(CompareResults, file).engines if result.engine == fault.engine)
        return ended.returncode, result, ended.stderr


def with_tests(source: Path = SOURCE) -> str:
    """Returns the path on which a command finds this package, and the jobs of the tests."""
    return os.pathsep.join([str(source), str(HERE.parent)])


def plantings(sizes: Sequence[int], words: Sequence[str], turns: int) -> list[tuple[Fault, str, int]]:
    """Returns each fault at so many of the numbers of ranks, on its jobs in turn; one of the ranks above 3 at 5."""
    faults = (*FAULTS, *causes.FAULTS)
    drawn = [
        (fault, fault.jobs[(number + turn) % len(fault.jobs)], of_fault[(number + turn) % len(of_fault)])
        for turn in range(turns)
        for number, fault in enumerate(faults)
        for of_fault in [sizes_of(fault, sizes)]
        if turn < len(of_fault)
    ]
    if AS_THREADS in sizes:
        above = [of_ranks_above(3, fault) for fault in OF_RANKS_ABOVE]
        drawn += [(fault, fault.jobs[0], AS_THREADS) for fault in above]
    return [planting for planting in drawn if not words or any(part in planting[0].name for part in words)]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    caught = sum(row["verdict"] in REJECTED for row in rows)
    named, explained = (sum(bool(row[what]) for row in rows) for what in ("named", "explained"))
    asked = sum(row["explained"] is not None for row in rows)
    causes_told = f"{explained} of {asked} with the right cause"
    return f"{len(rows)} plantings: {caught} caught, {named} rightly named, {causes_told}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a fault: where it is planted, on how many jobs, how often it was caught and named, and as what."""
    lines = ["| fault | planted in | on jobs | caught | named | as | cause |", "|---" * 7 + "|"]
    for name in dict.fromkeys(row["fault"] for row in rows):
        of = [row for row in rows if row["fault"] == name]
        sizes = " and ".join(str(size) for size in sorted({row["ranks"] for row in of}))
        counts = [sum(row["verdict"] in REJECTED for row in of)]
        counts += [sum(bool(row[what]) for row in of) for what in ("named", "explained")]
        caught, named, explained = (f"{count}/{len(of)}" for count in counts)
        seen = ", ".join(dict.fromkeys(str(row.get("quantity")) for row in of))
        jobs = f"{len({row['job'] for row in of})} at {sizes} ranks"
        lines.append(f"| {name} | `{of[0]['file']}` | {jobs} | {caught} | {named} | {seen} | {explained} |")
    return "\n".join(lines)


def with_table(docs: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The text `docs`, with its table and its counts made those of `rows`."""
    faults = len({row["fault"] for row in rows})
    docs = re.sub(r"plants \d+ faults", f"plants {faults} faults", docs)
    docs = re.sub(r"\*\*\d+ plantings: .*?\*\*", f"**{summary(rows)}.**", docs)
    return re.sub(r"\| fault \| planted in .*?\n(?=\n)", lambda _: markdown(rows) + "\n", docs, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep every row in this folder, and write the table of the docs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--only", nargs="+", default=[], help="faults with any of these words in their name")
    parser.add_argument(
        "--turns", type=int, default=3, help="at how many of the numbers of ranks each fault is planted"
    )
    parser.add_argument("--at-once", type=int, default=1, help="commands that run beside each other")
    options = parser.parse_args()
    file = options.out / "rows.json" if options.out else None
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file and file.exists() else []
    done = {(row["fault"], row["job"], row["ranks"]) for row in rows}
    asked = plantings(options.ranks, options.only, options.turns)
    left = [planting for planting in asked if (planting[0].name, *planting[1:]) not in done]
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda planting: planted(*planting), left):
            _print(row)
            if row["verdict"] == "unavailable":  # an engine that is not installed
                continue
            rows.append(row)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(rows, indent=1))
    print(f"{len({row['fault'] for row in rows})} faults, {summary(rows)}")
    if file and not options.only:
        DOCS.write_text(with_table(DOCS.read_text(), rows))
    return 0 if all(row["named"] for row in rows) else 1


def _print(row: Mapping[str, Any]) -> None:
    rejected = row["verdict"] in REJECTED
    state = "named" if row["named"] else "MISNAMED" if rejected else "MISSED"
    values = " {:.25}, found {:.25}".format(*(str(row.get(name)) for name in ("expected", "found")))
    print(f"{state:9} {row['ranks']} ranks  {row['job']:12} {row['fault']}: {row.get('quantity')}{values}")
    if row["explained"] is False:
        print(f"          another cause: {row.get('cause') or row.get('reason')}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
