"""Plants every fault, one at a time, and prints which of them the proof rejects and names rightly.

    python tests/mutations/plant.py [--out FOLDER] [--ranks 2 3] [--only WORDS]

Exit 0 when every fault is rejected and rightly named on every job that it can act on, at every number of ranks.
`--out` keeps every row in rows.json, and writes the table of docs/proof.md again.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from messages import explains, ids
from mutations.faults import FAULTS, Fault
from ranks import ONE_PROCESS, SOURCE, Ranks, RanksFailed, engine_facts, judged, proof_plan, reference_plan
from samestep.records.inspection import EngineFacts
from samestep.records.record import Record

DOCS = Path(__file__).parents[2] / "docs" / "proof.md"


class Patch(Protocol):
    """What is planted: `new` for `old` in a file of the package."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


def patched(fault: Patch, folder: Path) -> Path:
    """The package with the fault in it: one changed file, and links to all others, which take a tenth of a copy's time.
    Raises ValueError when the patch does not apply, SyntaxError when it leaves no Python."""
    text = (SOURCE / "samestep" / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"'{fault.name}' does not apply: its text stands {text.count(fault.old)} times in {fault.file}"
        )
    new = text.replace(fault.old, fault.new)
    ast.parse(new)  # raises SyntaxError: what cannot be imported is no fault to be caught
    source = folder / "src"
    changed = source / "samestep" / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(new)
    # Not a link: Python writes what it compiles of the changed file there.
    compiled = changed.parent / "__pycache__"
    compiled.mkdir()
    for path in (SOURCE / compiled.relative_to(source)).glob("*.pyc"):
        if path.name.partition(".")[0] != changed.stem:
            shutil.copy2(path, compiled)
    for parent in (path for path in changed.parents if source in path.parents):
        for path in (SOURCE / parent.relative_to(source)).iterdir():
            if not (parent / path.name).exists():
                (parent / path.name).symlink_to(path)
    return source


class References:
    """Plays the reference of each job at `size` replicas in each engine's layout once, with its rank's package."""

    def __init__(self, reference_rank: Ranks, size: int) -> None:
        self.reference_rank, self.size = reference_rank, size

    def of(self, job: str, facts: EngineFacts, also: str) -> Record:
        plan = reference_plan(f"jobs:{job}", self.size, {}, facts, also)
        return self.reference_rank.played(plan)


def sizes_of(fault: Fault, sizes: Sequence[int]) -> Sequence[int]:
    """The numbers of ranks to plant a fault at: one, where its engine is one process."""
    return (1,) if fault.engine in ONE_PROCESS else sizes


def plant(
    fault: Fault, references: References, jobs: Sequence[str] = (), *, threads: bool = False
) -> Iterator[dict[str, Any]]:
    """What the proof says about one fault on each of its jobs, at the references' number of ranks.

    The fault is on both sides, as users have one package: the reference is played by the patched one, too. Of a fault
    in an engine's file it is not, which no reference imports: `references` serve for all of these.

    jobs: these, instead of the fault's own. threads: the ranks are threads.
    """
    size = references.size
    facts = engine_facts(fault.engine, size, fault.settings)
    with ExitStack() as stack:
        source = patched(fault, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ranks = stack.enter_context(Ranks(size, source, engine=fault.engine, threads=threads))
        if not fault.file.startswith("engines/"):
            references = References(stack.enter_context(Ranks(1, source)), size)
        for job in jobs or fault.jobs:
            row: dict[str, Any] = {"fault": fault.name, "file": fault.file, "job": job, "ranks": size}
            row |= {"engine": fault.engine, "settings": dict(fault.settings)}
            try:
                verdict = judged(
                    references.of(job, facts, fault.also),
                    facts,
                    lambda loop, own: ranks.work(proof_plan(loop, f"jobs:{job}", fault.engine, size, {}, facts, own)),  # noqa: B023
                    fault.also,
                )
            except RanksFailed as error:
                yield row | {
                    "verdict": "failed",
                    "named": False,
                    "explained": False,
                    "reason": str(error).splitlines()[-1],
                }
                continue
            first = verdict.first_divergence
            if first is None:
                yield row | {"verdict": verdict.verdict, "named": False, "explained": False}
                continue
            shown = ("training", "quantity", "step", "tensor", "expected", "found")
            yield row | {
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
    return f"{len(rows)} plantings: {caught} caught, {named} rightly named, {explained} with the right cause"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a fault: where it is planted, on how many jobs, how often it was caught and named, and as what."""
    lines = ["| fault | planted in | on jobs | caught | named | as | cause |", "|---" * 7 + "|"]
    for name in dict.fromkeys(row["fault"] for row in rows):
        of = [row for row in rows if row["fault"] == name]
        sizes = " and ".join(str(size) for size in sorted({row["ranks"] for row in of}))
        counts = [sum(row["verdict"] == "differs" for row in of)]
        counts += [sum(row[what] for row in of) for what in ("named", "explained")]
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", default="", help="faults with these words in their name")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    rows = []
    for size in sorted({size for fault in faults for size in sizes_of(fault, options.ranks)}):
        with Ranks(1) as reference_rank:
            references = References(reference_rank, size)
            for fault in (fault for fault in faults if size in sizes_of(fault, options.ranks)):
                for row in plant(fault, references):
                    rows.append(row)
                    seen = row["verdict"] in ("differs", "failed")
                    state = "named" if row["named"] else "MISNAMED" if seen else "MISSED"
                    print(f"{state:9} {size} ranks  {row['job']:12} {row['fault']}: {row.get('quantity')}", end="")
                    print(
                        " {:.25}, found {:.25}".format(*(str(row.get(key)) for key in ("expected", "found"))),
                        flush=True,
                    )
                    if not row["explained"]:
                        print(f"          another cause: {row.get('cause') or row.get('reason')}", flush=True)
    print(f"{len(faults)} faults, {summary(rows)}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "rows.json").write_text(json.dumps(rows, indent=1))
        DOCS.write_text(with_table(DOCS.read_text(), rows))
    return 0 if all(row["named"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
