"""Which engines continue which trainings: two tables of docs/resume.md, measured and checked in.

    python tests/resume/table.py [--only WORDS] [--out FOLDER] [--missing] [--write]

A cell holds the weakest verdict over the jobs. `--out` keeps every verdict in pairs.json; `--missing` measures what is
not there yet; `--write` replaces the tables in the docs. All continuations of a training share its first launch.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import ONE_PROCESS, KeptRanks, Ranks, RanksFailed, engine_facts, resumed, resumed_reference_plan
from samestep.commands.engine_rows import why_not_continued_by
from samestep.records.inspection import EngineFacts
from samestep.records.plan import Plan
from samestep.records.record import Record

DOCS = Path(__file__).parents[2] / "docs" / "resume.md"
CONFORMANCE = Path(__file__).parents[1] / "conformance"
JOBS = {name: f"{CONFORMANCE}/jobs_resumed.py:{name}" for name in ("alike", "narrow", "stateful")}
SIZES = (1, 2, 3, 4)
SOON = ((2, 3), (2, 1), (2, 4), (3, 2), (1, 2), (4, 2))  # numbers of ranks that are measured first
THEMSELVES = {
    "single": ("single", {}),
    "ddp": ("ddp", {}),
    "zero": ("zero", {}),
    "fsdp": ("fsdp", {}),
    "amp bf16": ("amp", {}),
    "accelerate": ("accelerate", {}),
    "fabric": ("fabric", {}),
    "lightning": ("lightning", {}),
    "horovod": ("horovod", {}),
    "deepspeed": ("deepspeed", {}),
    "deepspeed stage=2": ("deepspeed", {"stage": "2"}),
    "deepspeed stage=3": ("deepspeed", {"stage": "3"}),
    "hf": ("hf", {}),
    "split": ("split", {}),
}
OTHERS = ("single", "ddp", "zero", "fsdp", "deepspeed")
STRENGTH = ("failed", "differs", "refused", "approximate", "same", "bitwise")


@dataclass(frozen=True)
class Pair:
    """An engine that begins a training on some ranks, and one that continues it."""

    first: str
    size: int
    then: str
    then_size: int

    def __str__(self) -> str:
        return f"{self.first} {self.size} -> {self.then} {self.then_size}"


def pairs() -> list[Pair]:
    """All pairs: each engine to itself on other ranks, and some engines to one another. The most telling come first."""
    sizes = [*SOON, *(sizes for sizes in product(SIZES, SIZES) if sizes not in SOON)]
    of = {name: [Pair(name, a, name, b) for a, b in sizes] for name in THEMSELVES if name not in ONE_PROCESS}
    soon, later = ([pair for each in of.values() for pair in each[part]] for part in (slice(6), slice(6, None)))
    others = [Pair(a, width(a), b, width(b)) for a, b in product(OTHERS, OTHERS) if a != b]
    return [*(Pair(name, 1, name, 1) for name in THEMSELVES if name in ONE_PROCESS), *soon, *others, *later]


def width(name: str) -> int:
    """The ranks of an engine that continues another one."""
    return 1 if name in ONE_PROCESS else 2


@dataclass(frozen=True)
class Seen:
    """What the proof said of one job on one pair."""

    pair: str
    job: str
    verdict: str
    max_difference: float | None = None
    said: str = ""

    @property
    def cell(self) -> str:
        return f"{self.verdict}: {self.said}" if self.said else self.verdict


class Bench(ExitStack):
    """Ranks of each size, kept between proofs, the references already played, and the trainings already begun."""

    def __init__(self) -> None:
        super().__init__()
        self.reference_rank = self.enter_context(Ranks(1))
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="samestep-begun-")))
        self.ranks = self.enter_context(KeptRanks())
        self.begun: dict[str, Path] = {}

    def prove(self, pair: Pair, job: str) -> Seen:
        """Proves one job on one pair."""
        facts = engine_facts(THEMSELVES[pair.first][0], pair.size, THEMSELVES[pair.first][1])
        then = engine_facts(THEMSELVES[pair.then][0], pair.then_size, THEMSELVES[pair.then][1])
        absent = next((each.reason for each in (facts, then) if not each.available), None)
        if absent:
            return Seen(str(pair), job, "unavailable", said=str(absent))
        if why := why_not_continued_by(facts, then):
            return Seen(str(pair), job, "refused", said=str(why))
        plan = resumed_reference_plan(JOBS[job], facts, then)
        try:
            ranks = (self.of(facts), facts), (self.of(then), then)
            verdict = resumed(self.reference_rank.played(plan), JOBS[job], *ranks, begin=partial(self._begin, facts))
        except RanksFailed as error:
            last = str(error).strip().splitlines()[-1]
            kind, _, sentence = last.partition(": ")
            return Seen(str(pair), job, "refused" if kind.endswith("Refused") else "failed", said=sentence or last)
        if first := verdict.first_divergence:
            what = " of ".join(filter(None, (first.quantity, first.tensor)))
            said = f"{what} at step {first.step}: {first.cause}"
            return Seen(str(pair), job, "differs", verdict.max_difference, said)
        word = "bitwise" if verdict.bitwise else verdict.verdict
        return Seen(str(pair), job, word, verdict.max_difference, str(verdict.reason or ""))

    def of(self, facts: EngineFacts) -> Ranks:
        """Ranks to train on; of their own for each library."""
        return self.ranks.of(facts.processes, facts.name)

    def _begin(self, facts: EngineFacts, plan: Plan, checkpoints: Path) -> Record:
        """Runs the first launch of an interrupted training, or takes what it has written before.

        Where it is interrupted depends on the other ranks only with Job(carry_state), which no job here has.
        """
        key = f"{facts.processes} {plan}".replace(str(checkpoints), "").replace("other_ranks=True", "other_ranks=False")
        if key not in self.begun:
            record = self.of(facts).work(plan)
            self.begun[key] = self.folder / str(len(self.begun))
            sockets = shutil.ignore_patterns("collectives-*")
            # The ranks remove theirs when they end.
            shutil.copytree(record.folder, self.begun[key] / "record", ignore=sockets)
            shutil.copytree(checkpoints, self.begun[key] / "checkpoints")
        else:
            shutil.copytree(self.begun[key] / "checkpoints", checkpoints, dirs_exist_ok=True)
        return Record(self.begun[key] / "record")


def jobs_of(pair: Pair) -> tuple[str, str]:
    """The jobs that a pair is measured with. DeepSpeed's stage 3 takes no averages of weights."""
    return ("narrow" if "stage=3" in f"{pair}" else "alike", "stateful")


def measured(only: str = "", known: frozenset[tuple[str, str]] = frozenset()) -> Iterator[Seen]:
    """Measures the tables, pair by pair, without the (pair, job) that are `known`."""
    with Bench() as bench:
        for pair in (pair for pair in pairs() if only in str(pair)):
            for job in jobs_of(pair):
                if (str(pair), job) not in known:
                    yield bench.prove(pair, job)


def cells(seen: list[Seen]) -> dict[str, str]:
    """Pair -> the weakest verdict over the jobs."""
    of: dict[str, list[Seen]] = {}
    for each in seen:
        of.setdefault(each.pair, []).append(each)
    order = {word: at for at, word in enumerate(("unavailable", *STRENGTH))}
    return {pair: min(group, key=lambda each: order[each.verdict]).cell for pair, group in of.items()}


def markdown(found: Mapping[str, str]) -> str:
    """The tables as Markdown; long cells become notes below."""
    notes: list[str] = []
    possible = set(pairs())

    def cell(pair: Pair) -> str:
        if pair.first == pair.then and pair not in possible:
            return "–"
        word, _, why = found.get(str(pair), "").partition(": ")
        if why and why not in notes:
            notes.append(why)
        return f"{word} [{notes.index(why) + 1}]" if why else word

    sizes = list(product(SIZES, SIZES))
    lines = ["| engine | " + " | ".join(f"{a} → {b}" for a, b in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    for name in THEMSELVES:
        lines.append(f"| {name} | " + " | ".join(cell(Pair(name, a, name, b)) for a, b in sizes) + " |")
    lines += ["", "| begun by | " + " | ".join(f"→ {name} {width(name)}" for name in OTHERS) + " |"]
    lines.append("|---" * (1 + len(OTHERS)) + "|")
    for a in OTHERS:
        row = [cell(Pair(a, width(a), b, width(b))) for b in OTHERS]
        lines.append(f"| {a} {width(a)} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *(f"[{number}] {why}\n" for number, why in enumerate(notes, 1))])


def summary(seen: list[Seen]) -> str:
    """How many cells there are of each verdict, and the greatest difference of any weight at the end."""
    found = cells(seen)
    counts = Counter(cell.partition(":")[0] for cell in found.values())
    each = ", ".join(f"{counts[word]} {word}" for word in ("unavailable", *STRENGTH)[::-1] if counts[word])
    kinds = {"in float64": list[float](), "with DeepSpeed, whose weights are float32": list[float]()}
    exact, rounded = kinds.values()
    for row in seen:
        (rounded if "deepspeed" in row.pair else exact).append(row.max_difference or 0.0)
    greatest = ", ".join(f"{max(values):.1e} {name}" for name, values in kinds.items() if values)
    return f"{len(found)} of {len(pairs())} cells: {each}.\nThe greatest difference of a weight at the end: {greatest}."


def with_tables(docs: str, seen: list[Seen]) -> str:
    """The text `docs`, with the tables of pairs made those of `seen`."""
    between = re.compile(r"(<!-- pairs -->\n).*?(<!-- end of pairs -->)", re.DOTALL)
    return between.sub(lambda match: f"{match[1]}\n{summary(seen)}\n\n{markdown(cells(seen))}\n{match[2]}", docs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs with these words in their name")
    parser.add_argument("--out", type=Path, help="keep every verdict in this folder, beside those already there")
    parser.add_argument("--missing", action="store_true", help="measure what --out does not hold yet")
    parser.add_argument("--write", action="store_true", help="replace the tables in the docs")
    options = parser.parse_args()
    kept = options.out / "pairs.json" if options.out else None
    seen = [Seen(**row) for row in json.loads(kept.read_text())] if kept and kept.exists() else []
    known = frozenset((each.pair, each.job) for each in seen) if options.missing else frozenset()
    began = time.monotonic()
    for each in measured(options.only, known):
        seen = [*(other for other in seen if (other.pair, other.job) != (each.pair, each.job)), each]
        print(f"{time.monotonic() - began:.1f} s", each.pair, each.job, each.cell, each.max_difference, flush=True)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([asdict(row) for row in seen], indent=1) + "\n")
    if options.write:
        DOCS.write_text(with_tables(DOCS.read_text(), seen))


if __name__ == "__main__":
    main()
