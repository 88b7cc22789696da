"""Every behaviour that a job can have x every engine: one table, docs/conformance.md, measured and checked in.

    python tests/conformance/table.py [--only WORDS] [--write] [--complete]

A cell holds the weakest verdict over the behaviour's numbers of ranks. `--write` replaces the table in the docs.
`--complete` also proves later epochs and the job's own dtype, as `samestep verify` does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import ELSEWHERE, KeptRanks, Ranks, RanksFailed, engine_facts, prove
from samestep.commands.engine_rows import refusal
from samestep.records.inspection import JobFacts
from samestep.records.results import Verdict
from samestep.tasks.inspect.engines import dividing_engines
from samestep.tasks.inspect.job import inspect_job

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
DRAWN = f"{Path(__file__).parent}/jobs_drawn.py:job"

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

ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "single": ("single", {}),
    "split": ("split", {}),
    "split in_flight=2": ("split", {"in_flight": "2"}),
    "ddp": ("ddp", {}),
    "ddp order=rank": ("ddp", {"order": "rank"}),
    "ddp static_graph": ("ddp", {"static_graph": "true"}),
    "ddp find_unused": ("ddp", {"find_unused": "true"}),
    "ddp compress=fp16": ("ddp", {"compress": "fp16"}),
    "ddp compress=powersgd": ("ddp", {"compress": "powersgd"}),
    "tensor": ("tensor", {}),
    "tensor, two replicas": ("tensor", {}),
    "zero": ("zero", {}),
    "fsdp": ("fsdp", {}),
    "fsdp wrap=root": ("fsdp", {"wrap": "root"}),
    "fsdp checkpoint": ("fsdp", {"checkpoint": "true", "reshard": "false"}),
    "fsdp bf16": ("fsdp", {"precision": "bf16"}),
    "fsdp, replicas of shards": ("fsdp", {}),
    "fsdp, shards of tensor parallel layers": ("fsdp", {}),
    "amp bf16": ("amp", {}),
    "amp fp16": ("amp", {"precision": "fp16"}),
    "accelerate": ("accelerate", {}),
    "accelerate bf16": ("accelerate", {"precision": "bf16"}),
    "fabric": ("fabric", {}),
    "fabric bf16": ("fabric", {"precision": "bf16"}),
    "fabric model_parallel": ("fabric", {"strategy": "model_parallel"}),
    "lightning": ("lightning", {}),
    "lightning bf16": ("lightning", {"precision": "bf16"}),
    "lightning model_parallel": ("lightning", {"strategy": "model_parallel"}),
    "hf": ("hf", {}),
    "hf bf16": ("hf", {"precision": "bf16"}),
    "fairscale": ("fairscale", {}),
    "ray": ("ray", {}),
    "horovod": ("horovod", {}),
    "horovod compress=fp16": ("horovod", {"compress": "fp16"}),
    "deepspeed": ("deepspeed", {}),
    "deepspeed stage=2": ("deepspeed", {"stage": "2"}),
    "deepspeed stage=3": ("deepspeed", {"stage": "3"}),
}
# Of an engine on a mesh: the number of ranks -> how they are arranged.
MESHES = {
    "tensor": {2: "tensor=2"},
    "tensor, two replicas": {4: "data=2,tensor=2"},
    "fsdp, replicas of shards": {4: "data=2,shard=2"},
    "fsdp, shards of tensor parallel layers": {4: "shard=2,tensor=2"},
}
# Of several ranks with a process group, and as exact as the job: what each of the other tables is a product with.
EXACT = [
    name
    for name, (engine, given) in ENGINES.items()
    if not given and name not in MESHES and engine not in (*ELSEWHERE, "single", "split", "amp")
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

    def prove(
        self, engine: str, given: Mapping[str, str], settings: Mapping[str, str], size: int, mesh: str = ""
    ) -> Verdict:
        facts = engine_facts(engine, size, given, mesh)
        if why := refusal(facts, _inspected(tuple(settings.items()), size, engine if facts.mesh else "", mesh)):
            return Verdict("refused", reason=why)
        if mesh:
            # In a process of their own: DTensor keeps the groups of a mesh, which kept ranks destroy after a proof.
            with Ranks(size, threads=True) as ranks:
                return prove(
                    self.reference_rank, ranks, DRAWN, engine, settings, given, complete=self.complete, mesh=mesh
                )
        of_size = self.ranks.of(size, engine, given)
        return prove(self.reference_rank, of_size, DRAWN, engine, settings, given, complete=self.complete)


@lru_cache
def _inspected(settings: tuple[tuple[str, str], ...], size: int, dividing: str = "", mesh: str = "") -> JobFacts:
    """dividing: the engine whose ranks divide the model."""
    row = engine_facts(dividing, size, mesh=mesh) if dividing else None
    fewer = [row.replicas] if row else []
    divides = dividing_engines([row], [dividing], "cpu") if row else {}
    return inspect_job(DRAWN, dict(settings), size, 8, "cpu", fewer=fewer, dividing=divides)


def measure(bench: Bench, name: str, behaviours: Sequence[str] = (*BEHAVIOURS,)) -> dict[str, str]:
    """Measures an engine's row: the weakest verdict over each behaviour's numbers of ranks ('same', 'approximate',
    'refused: why', …), and the numbers of ranks at which all that is same is so to the last bit."""
    engine, given = ENGINES[name]
    row, same = {}, defaultdict(list)
    for behaviour in behaviours:
        (settings, sizes), cells = BEHAVIOURS[behaviour], []
        for size in (1,) if engine in ("single", "split") else MESHES.get(name, {}) or sizes:
            try:
                verdict = bench.prove(engine, given, settings, size, MESHES.get(name, {}).get(size, ""))
                cells.append(_cell(verdict))
                if verdict.verdict == "same":
                    same[size].append(verdict.bitwise)
            except RanksFailed as error:
                cells.append(_failed(str(error)))
        row[behaviour] = min(cells, key=lambda text: STRENGTH.index(text.partition(":")[0]))
    row[BITWISE] = " ".join(str(size) for size in sorted(same) if all(same[size])) or "–"
    return row


def _cell(verdict: Verdict) -> str:
    if first := verdict.first_divergence:
        return f"differs: {first.quantity} at step {first.step}"
    return f"refused: {verdict.reason}" if verdict.verdict == "refused" else verdict.verdict


def _failed(said: str) -> str:
    last = said.strip().splitlines()[-1]
    kind, _, sentence = last.partition(": ")
    return f"{'refused' if kind.endswith('Refused') else 'failed'}: {sentence or last}"


def columns(only: str = "", *, complete: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Measures the table, one engine after the other: (engine, behaviour -> cell)."""
    with Bench(complete=complete) as bench:
        for name in ENGINES:
            if only in name:
                yield name, measure(bench, name)


def documented() -> dict[str, dict[str, str]]:
    """Reads the table in the docs: engine -> behaviour -> cell."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    notes = dict(re.findall(r"^\[(\d+)\] (.+)$", DOCS.read_text(), re.MULTILINE))
    head, _, *rows = [[text.strip() for text in line.strip("|").split("|")] for line in lines]
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = [re.sub(r" \[(\d+)\]", lambda match: f": {notes[match[1]]}", text) for text in row[1:]]
        table[row[0]] = dict(zip(head[1:], cells))
    return table


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
    parser.add_argument("--only", default="", help="engines with these words in their name")
    parser.add_argument("--complete", action="store_true", help="also prove later epochs and the job's own dtype")
    parser.add_argument("--write", action="store_true", help="replace the table in the docs")
    options = parser.parse_args()
    table = {} if not options.write or not options.only else documented()
    for name, row in columns(options.only, complete=options.complete):
        table[name] = row
        print(name, {b: c for b, c in row.items() if c not in ("same", "approximate")} or set(row.values()), flush=True)
    if options.write:
        table = {name: table[name] for name in ENGINES if name in table}
        head = DOCS.read_text().partition("\n| engine |")[0]
        DOCS.write_text(f"{head}\n{markdown(table)}")


if __name__ == "__main__":
    main()
