"""Every behaviour that a job can have x every engine: the tables of docs/conformance.md, measured and checked in.

    python tests/conformance/table.py [--only WORDS] [--write] [--complete]

A cell holds the weakest verdict over the behaviour's numbers of ranks. The second table has the same behaviours on a
model that the ranks of each of its engines can divide. `--write` replaces the tables in the docs. `--complete` also
proves later epochs and the job's own dtype, as `samestep verify` does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from inspected_job import demands, inspected_job
from ranks import ELSEWHERE, KeptRanks, Ranks, RanksFailed, engine_facts, prove
from samestep.commands.engine_rows import refusal
from samestep.records.inspection import JobFacts
from samestep.records.results import Verdict
from samestep.world.mesh import parse_mesh

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
DRAWN, DIVIDED = (f"{Path(__file__).parent}/{name}.py:job" for name in ("jobs_drawn", "jobs_divided"))

# behaviour -> the job's settings, and the numbers of ranks
BEHAVIOURS: dict[str, tuple[dict[str, str], tuple[int, ...]]] = {
    "even batches": ({"rows": "24", "global_batch": "12"}, (1, 2, 3)),
    "uneven batches": ({"rows": "29", "global_batch": "8"}, (1, 2, 3)),
    "a batch that the ranks share unevenly": ({"rows": "30", "global_batch": "7"}, (2, 3)),
    "fewer rows than ranks at the end": ({"rows": "17", "global_batch": "16"}, (3,)),
    "a rank without rows": ({"rows": "9", "global_batch": "1"}, (3,)),
    "fewer rows than a batch": ({"rows": "5", "global_batch": "8"}, (2,)),
    "last batch dropped": ({"rows": "29", "global_batch": "8", "last": "drop"}, (2,)),
    "not shuffled": ({"shuffle": "false", "rows": "29"}, (2,)),
    "dropout": ({"arch": "deep", "rows": "29"}, (2,)),
    "BatchNorm": ({"arch": "batchnorm", "rows": "29"}, (2,)),
    "buffers of masks": ({"arch": "masked"}, (2,)),
    "tied weights": ({"arch": "tied"}, (2,)),
    "frozen parameter": ({"frozen": "true"}, (2,)),
    "unused parameter": ({"arch": "unused"}, (2,)),
    "a stream": ({"stream": "true", "rows": "29"}, (2,)),
    "a stream, accumulation": ({"stream": "true", "micro_batch": "2"}, (2,)),
    "weighted rows": ({"weighted": "true", "rows": "29"}, (2,)),
    "clipping": ({"clip_norm": "0.1"}, (2,)),
    "accumulation": ({"rows": "32", "global_batch": "8", "micro_batch": "2"}, (2,)),
    "accumulation, partial window": ({"rows": "10", "global_batch": "9", "micro_batch": "1"}, (2, 3)),
    "accumulation, BatchNorm": ({"arch": "batchnorm", "global_batch": "16", "rows": "44", "micro_batch": "4"}, (2,)),
    "scheduler by step": ({"every": "step", "micro_batch": "2"}, (2,)),
    "scheduler by epoch": ({"every": "epoch", "micro_batch": "2"}, (2,)),
    "AdamW, groups": ({"optimizer": "groups", "clip_norm": "0.5", "every": "step"}, (2,)),
    "LBFGS": ({"optimizer": "lbfgs", "rows": "29"}, (2,)),
}


@dataclass(frozen=True)
class Row:
    """An engine with its settings, the job that it is measured with, and settings of that. meshes: how its numbers of
    ranks are arranged; none: it takes the behaviour's numbers, without a mesh."""

    engine: str
    given: Mapping[str, str] = field(default_factory=dict)
    meshes: Mapping[int, str] = field(default_factory=dict)
    job: str = DRAWN
    settings: Mapping[str, str] = field(default_factory=dict)


def divided(mesh: str, engine: str, given: Mapping[str, str] | None = None, **settings: str) -> Row:
    """Returns a row of the second table."""
    arranged = parse_mesh(mesh)
    assert arranged
    return Row(engine, given or {}, {arranged.size: mesh}, DIVIDED, settings)


ENGINES: dict[str, Row] = {
    "single": Row("single"),
    "split": Row("split"),
    "split in_flight=2": Row("split", {"in_flight": "2"}),
    "ddp": Row("ddp"),
    "ddp order=rank": Row("ddp", {"order": "rank"}),
    "ddp static_graph": Row("ddp", {"static_graph": "true"}),
    "ddp find_unused": Row("ddp", {"find_unused": "true"}),
    "ddp compress=fp16": Row("ddp", {"compress": "fp16"}),
    "ddp compress=powersgd": Row("ddp", {"compress": "powersgd"}),
    "tensor": Row("tensor", meshes={2: "tensor=2"}),
    "tensor, two replicas": Row("tensor", meshes={4: "data=2,tensor=2"}),
    "pipeline": Row("pipeline", meshes={2: "stage=2"}),
    "context": Row("context", meshes={2: "sequence=2"}),
    "expert": Row("expert", meshes={2: "expert=2"}),
    "zero": Row("zero"),
    "fsdp": Row("fsdp"),
    "fsdp wrap=root": Row("fsdp", {"wrap": "root"}),
    "fsdp checkpoint": Row("fsdp", {"checkpoint": "true", "reshard": "false"}),
    "fsdp offload": Row("fsdp", {"offload": "true"}),
    "fsdp bf16": Row("fsdp", {"precision": "bf16"}),
    "fsdp, replicas of shards": Row("fsdp", meshes={4: "data=2,shard=2"}),
    "fsdp, shards of tensor parallel layers": Row("fsdp", meshes={4: "shard=2,tensor=2"}),
    "amp bf16": Row("amp"),
    "amp fp16": Row("amp", {"precision": "fp16"}),
    "accelerate": Row("accelerate"),
    "accelerate bf16": Row("accelerate", {"precision": "bf16"}),
    "fabric": Row("fabric"),
    "fabric bf16": Row("fabric", {"precision": "bf16"}),
    "fabric model_parallel": Row("fabric", {"strategy": "model_parallel"}),
    "lightning": Row("lightning"),
    "lightning bf16": Row("lightning", {"precision": "bf16"}),
    "lightning model_parallel": Row("lightning", {"strategy": "model_parallel"}),
    "hf": Row("hf"),
    "hf bf16": Row("hf", {"precision": "bf16"}),
    "fairscale": Row("fairscale"),
    "ray": Row("ray"),
    "horovod": Row("horovod"),
    "horovod compress=fp16": Row("horovod", {"compress": "fp16"}),
    "deepspeed": Row("deepspeed"),
    "deepspeed stage=2": Row("deepspeed", {"stage": "2"}),
    "deepspeed stage=3": Row("deepspeed", {"stage": "3"}),
}
# Whose ranks divide the model.
DIVIDING: dict[str, Row] = {
    "tensor, tensor=2": divided("tensor=2", "tensor"),
    "pipeline, stage=2": divided("stage=2", "pipeline"),
    "pipeline, data=2,stage=2": divided("data=2,stage=2", "pipeline"),
    "pipeline, stage=2,shard=2": divided("stage=2,shard=2", "pipeline"),
    "context, sequence=2": divided("sequence=2", "context"),
    "context, data=2,sequence=2": divided("data=2,sequence=2", "context"),
    "context how=ulysses, sequence=2": divided("sequence=2", "context", {"how": "ulysses"}),
    "context how=ring, sequence=2": divided("sequence=2", "context", {"how": "ring"}),
    "expert, expert=2": divided("expert=2", "expert"),
    "expert, data=2,expert=2": divided("data=2,expert=2", "expert"),
    "expert, expert=2, rows by choice": divided("expert=2", "expert", sparse="true"),
}
TABLES = (ENGINES, DIVIDING)
ROWS = ENGINES | DIVIDING
# Of several ranks with a process group, and as exact as the job: what each of the other tables is a product with.
EXACT = [
    name
    for name, row in ENGINES.items()
    if not row.given and not row.meshes and row.engine not in (*ELSEWHERE, "single", "split", "amp")
]
BITWISE = "bitwise at"
COLUMNS = (*BEHAVIOURS, BITWISE)
STRENGTH = ("undefined", "failed", "differs", "refused", "approximate", "same")


class Bench(ExitStack):
    """Ranks kept between proofs, and the one that plays the references. complete: as of ranks.prove."""

    def __init__(self, *, complete: bool = False) -> None:
        super().__init__()
        self.complete = complete
        self.reference_rank = self.enter_context(Ranks(1))
        self.ranks = self.enter_context(KeptRanks())

    def prove(self, row: Row, settings: Mapping[str, str], size: int) -> Verdict:
        mesh, given, settings = row.meshes.get(size, ""), row.given, {**settings, **row.settings}
        facts = engine_facts(row.engine, size, given, mesh)
        divides = (row.engine, tuple(given.items()), mesh) if facts.mesh else None
        if why := refusal(facts, _inspected(row.job, tuple(settings.items()), size, divides)):
            return Verdict("refused", reason=why)
        if mesh:
            # In a process of their own: DTensor keeps the groups of a mesh, which kept ranks destroy after a proof.
            with Ranks(size, threads=True) as ranks:
                return prove(
                    self.reference_rank, ranks, row.job, row.engine, settings, given, complete=self.complete, mesh=mesh
                )
        of_size = self.ranks.of(size, row.engine, given)
        return prove(self.reference_rank, of_size, row.job, row.engine, settings, given, complete=self.complete)


@lru_cache
def _inspected(
    job: str,
    settings: tuple[tuple[str, str], ...],
    size: int,
    dividing: tuple[str, tuple[tuple[str, str], ...], str] | None = None,
) -> JobFacts:
    """dividing: the engine whose ranks divide the model, its settings, and the mesh."""
    if dividing is None:
        return inspected_job(job, dict(settings), size)
    engine, given, mesh = dividing
    row = engine_facts(engine, size, dict(given), mesh)
    return inspected_job(job, dict(settings), size, engines=demands(row))


def measure(bench: Bench, name: str, behaviours: Sequence[str] = (*BEHAVIOURS,)) -> dict[str, str]:
    """Measures a row: the weakest verdict over each behaviour's numbers of ranks ('same', 'approximate',
    'refused: why', …), and the numbers of ranks at which all that is same is so to the last bit."""
    row = ROWS[name]
    measured, same = {}, defaultdict(list)
    for behaviour in behaviours:
        (settings, sizes), cells = BEHAVIOURS[behaviour], []
        for size in (1,) if row.engine in ("single", "split") else row.meshes or sizes:
            try:
                verdict = bench.prove(row, settings, size)
                cells.append(_cell(verdict))
                if verdict.verdict == "same":
                    same[size].append(verdict.bitwise)
            except RanksFailed as error:
                cells.append(_failed(str(error)))
        measured[behaviour] = min(cells, key=lambda text: STRENGTH.index(text.partition(":")[0]))
    measured[BITWISE] = " ".join(str(size) for size in sorted(same) if all(same[size])) or "–"
    return measured


def _cell(verdict: Verdict) -> str:
    if first := verdict.first_divergence:
        return f"differs: {first.quantity} at step {first.step}"
    return f"refused: {verdict.reason}" if verdict.verdict == "refused" else verdict.verdict


def _failed(said: str) -> str:
    last = said.strip().splitlines()[-1]
    kind, _, sentence = last.partition(": ")
    return f"{'refused' if kind.endswith('Refused') else 'failed'}: {sentence or last}"


def columns(only: str = "", *, complete: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Measures the tables, one row after the other: (name, behaviour -> cell)."""
    with Bench(complete=complete) as bench:
        for name in ROWS:
            if only in name:
                yield name, measure(bench, name)


def documented() -> dict[str, dict[str, str]]:
    """Reads the tables in the docs: row -> behaviour -> cell."""
    table: dict[str, dict[str, str]] = {}
    for _, text in _sections():
        notes = dict(re.findall(r"^\[(\d+)\] (.+)$", text, re.MULTILINE))
        lines = [line for line in text.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for row in rows:
            cells = [re.sub(r" \[(\d+)\]", lambda match, of=notes: f": {of[match[1]]}", text) for text in row[1:]]
            table[row[0]] = dict(zip(head[1:], cells))
    return table


def _sections() -> list[tuple[str, str]]:
    """Returns the sections of the docs: what is said before the table, and the table with its notes."""
    sections = re.split(r"^(?=## )", DOCS.read_text(), flags=re.MULTILINE)
    return [(head, f"| engine |{table}") for head, _, table in (text.partition("| engine |") for text in sections)]


def markdown(table: Mapping[str, Mapping[str, str]]) -> str:
    """The table as Markdown, a row for each engine; long cells become notes below."""
    notes: list[str] = []

    def short(text: str) -> str:
        word, _, why = text.partition(": ")
        if not why:
            return word
        if why not in notes:
            notes.append(why)
        return f"{word} [{notes.index(why) + 1}]"

    lines = ["| engine | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | " + " | ".join(short(row[c]) for c in COLUMNS) + " |" for name, row in table.items()]
    return "\n".join([*lines, "", *(f"[{n}] {why}\n" for n, why in enumerate(notes, 1))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with these words in their name")
    parser.add_argument("--complete", action="store_true", help="also prove later epochs and the job's own dtype")
    parser.add_argument("--write", action="store_true", help="replace the tables in the docs")
    options = parser.parse_args()
    found = {} if not options.write or not options.only else documented()
    for name, row in columns(options.only, complete=options.complete):
        found[name] = row
        print(name, {b: c for b, c in row.items() if c not in ("same", "approximate")} or set(row.values()), flush=True)
    if options.write:
        tables = [{name: found[name] for name in rows if name in found} for rows in TABLES]
        heads = [head for head, _ in _sections()]
        DOCS.write_text("\n".join(f"{head}{markdown(table)}" for head, table in zip(heads, tables, strict=True)))


if __name__ == "__main__":
    main()
