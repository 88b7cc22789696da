"""Proves each engine that divides a model at 2 to 64 ranks, as threads of one process, and measures what a step costs.

    python benchmarks/model_parallel.py --data TEXT --out results/model_parallel_2cpu_DATE [--only tensor …] [--ranks …]

Writes proofs.json: for each engine, mesh and way to start ranks the seconds by the clock and of the processors (the
command and all that it has started), the machine's load, and the verdict; at 2 and 4 ranks also as processes. And
costs.json: of `samestep compare` on 4 and 8 ranks, processes, each rank's memory by what holds it, the bytes that it
sends along each axis, and the bubble. table.md: both. --data: any text file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AS_PROCESSES = (2, 4)
COSTS_AT = (4, 8)
GPT = ("charlm", "limit=2000", "length=64")
MOE = ("examples/moe.py", "experts=64", "batch_size=128")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """One way to divide a model. mesh: of so many ranks. job: its name and its settings; `layers`: a block a rank.
    settings: the engine's."""

    engine: str
    mesh: Callable[[int], str]
    job: tuple[str, ...]
    fewest: int = 2
    settings: tuple[str, ...] = ()


CASES = {
    "tensor": Case("tensor", "tensor={}".format, (*GPT, "layers=2", "heads=64", "width=128", "global_batch=16")),
    "fsdp x tensor": Case(
        "fsdp",
        lambda ranks: f"shard=2,tensor={ranks // 2}",
        (*GPT, "layers=2", "heads=32", "width=128", "global_batch=16"),
        fewest=4,
    ),
    "pipeline": Case(
        "pipeline",
        "stage={}".format,
        (*GPT, "layers={layers}", "heads=2", "width=16", "global_batch=64"),
        settings=("microbatches={ranks}",),
    ),
    "pipeline, GPipe": Case(
        "pipeline",
        "stage={}".format,
        (*GPT, "layers={layers}", "heads=2", "width=16", "global_batch=64"),
        settings=("schedule=GPipe", "microbatches=4"),
    ),
    "pipeline x fsdp": Case(
        "pipeline",
        lambda ranks: f"stage={ranks // 2},shard=2",
        (*GPT, "layers={layers}", "heads=2", "width=16", "global_batch=64"),
        fewest=4,
        settings=("microbatches={half}",),
    ),
    "context": Case("context", "sequence={}".format, (*GPT, "layers=2", "heads=4", "width=128", "global_batch=16")),
    "expert": Case("expert", "expert={}".format, MOE),
}


def words(case: Case, ranks: int, data: Path) -> list[str]:
    """Returns the arguments that name the job, the engine and its mesh."""
    name, *settings = (word.format(layers=max(ranks, 4)) for word in case.job)
    settings += [f"data={data}"] if name == "charlm" else []
    named = [word for setting in settings for word in ("--set", setting)]
    of_engine = [setting.format(ranks=ranks, half=ranks // 2) for setting in case.settings]
    named += [word for setting in of_engine for word in ("--set-engine", setting)]
    return [name, *named, "--engine", case.engine, "--mesh", case.mesh(ranks)]


def ran(arguments: Sequence[str], data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a command. Returns what it took, and its results; {} where it has none. data: TEXT in what is kept."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "samestep", *arguments, "--json", "--out", f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {
        "command": " ".join(arguments).replace(str(data), "TEXT"),
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "load": os.getloadavg()[0],
    }
    return (took, json.loads(done.stdout)) if done.stdout else (took | {"stderr": done.stderr[-500:]}, {})


def proof(name: str, ranks: int, ranks_as: str, data: Path) -> dict[str, Any]:
    """Runs one proof, and returns its row."""
    mesh = CASES[name].mesh(ranks)
    took, results = ran(["verify", *words(CASES[name], ranks, data), "--as", ranks_as, "--quick"], data)
    row = {"case": name, "ranks": ranks, "mesh": mesh, "as": ranks_as, **took}
    for found in results.get("engines", ()):
        row |= {key: found[key] for key in ("verdict", "bitwise", "max_difference", "bound")}
    return row


def costs(name: str, ranks: int, data: Path) -> dict[str, Any]:
    """Measures one case as processes, and returns its row."""
    mesh = CASES[name].mesh(ranks)
    measured = ["--rounds", "1", "--warmup-steps", "1", "--measured-steps", "2", "--launcher", "fork", "--quick"]
    took, results = ran(["compare", *words(CASES[name], ranks, data), *measured], data)
    rows = [row for row in results.get("engines", ()) if row["engine"] == CASES[name].engine]
    return {"case": name, "ranks": ranks, "mesh": mesh, **took, "costs": rows[0]["costs"] if rows else []}


def import_s() -> float:
    """Returns the seconds of an import of torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def table(proofs: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]], unit_s: float) -> str:
    """Returns both as tables in Markdown."""
    lines = [f"An import of torch took {unit_s:.2f} s.", ""]
    lines += ["| case | mesh | ranks as | verdict | largest difference | seconds |", "|---|---|---|---|---|---|"]
    for row in proofs:
        difference = row.get("max_difference")
        said = row.get("verdict", "none") + (" (bitwise)" if row.get("bitwise") else "")
        figures = "-" if difference is None else f"{difference:.1e}"
        lines.append(f"| {row['case']} | `{row['mesh']}` | {row['as']} | {said} | {figures} | {row['seconds']} |")
    lines += ["", "Of one step, the rank that needs most memory, in MiB:", ""]
    lines += ["| case | mesh | parameters | gradients | optimizer | activations | peak | sent | bubble |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in measured:
        if not row["costs"]:
            continue
        cost = max(row["costs"], key=lambda cost: cost["memory"]["total"])
        held = [cost["memory"][part] for part in ("parameters", "gradients", "optimizer", "others", "total")]
        cells = [f"{size / 2**20:.3g}" for size in held]
        cells += [", ".join(f"{axis} {size / 2**20:.3g}" for axis, size in cost["sent"].items()) or "-"]
        bubbles = [rank["bubble"] for rank in row["costs"] if rank["bubble"] is not None]
        cells += [f"{100 * sum(bubbles) / len(bubbles):.0f} %" if bubbles else "-"]
        lines.append(f"| {row['case']} | `{row['mesh']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    data, unit_s = asked.data.resolve(), import_s()
    proofs: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []

    def keep() -> None:
        (asked.out / "proofs.json").write_text(json.dumps(proofs, indent=1) + "\n")
        (asked.out / "costs.json").write_text(json.dumps(measured, indent=1) + "\n")
        (asked.out / "table.md").write_text(table(proofs, measured, unit_s))

    for name in asked.only:
        counts = [ranks for ranks in asked.ranks if ranks >= CASES[name].fewest]
        for ranks_as in ("threads", "processes"):
            for ranks in counts if ranks_as == "threads" else sorted({*counts} & {*AS_PROCESSES}):
                proofs.append(proof(name, ranks, ranks_as, data))
                print(proofs[-1], flush=True)
                keep()
        for ranks in sorted({*counts} & {*COSTS_AT}):
            measured.append(costs(name, ranks, data))
            print(measured[-1]["command"], measured[-1]["exit"], flush=True)
            keep()


if __name__ == "__main__":
    main()
