"""How the order of engines changes with the bandwidth between two hosts, and what the report expects of it.

    python benchmarks/bandwidth.py --data TEXT --out results/bandwidth_2cpu_DATE [--rates 10gbit 100mbit …]

Needs root and iproute2: makes two hosts with networks of their own, gives the links between them each rate, and runs
`samestep compare` on both. Writes rates.json: for each rate the milliseconds of a step of each engine, what a rank
sends, and the bandwidths below which the report of the fastest link expects one engine to fall behind another; and
table.md. --data: any text file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cluster.hosts import Hosts, missing
from samestep.records.results import CompareResults, read_results
from samestep.report.cost_table import crossing_lines
from samestep.report.language import text

ENGINES = "ddp,fsdp,tensor,pipeline"
JOB = ("charlm", "limit=2000", "length=32", "layers=4", "heads=4", "width=128", "global_batch=16")


def compared(hosts: Hosts, data: Path, folder: Path) -> CompareResults:
    """Runs the comparison on both hosts, and returns its results."""
    name, *settings = JOB
    named = [word for setting in (*settings, f"data={data}") for word in ("--set", setting)]
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--out", str(folder)]
    measured = ["--rounds", "3", "--warmup-steps", "3", "--measured-steps", "10", "--quick"]
    command = [sys.executable, "-m", "samestep", "compare", name, *named, "--engines", ENGINES, *shape, *measured]
    started = [hosts.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for host in range(2)]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(said))
    return read_results(CompareResults, folder)


def row(rate: str, results: CompareResults) -> dict[str, Any]:
    """Returns what one rate has shown."""
    engines = {
        result.engine: {
            "verdict": result.verdict,
            "step_ms": result.step_ms.step if result.step_ms else None,
            "sent_bytes": max((sum(cost.sent.values()) for cost in result.costs), default=0),
        }
        for result in results.engines
    }
    lines = [text(line) for line in crossing_lines(results)]
    return {"rate": rate, "load": os.getloadavg()[0], "engines": engines, "expected": lines}


def table(rows: list[dict[str, Any]]) -> str:
    names = ENGINES.split(",")
    lines = ["Milliseconds of a step, medians of 3 launches of 10 steps; the fastest of several ranks is bold.", ""]
    lines += [f"| link | {' | '.join(names)} | single |", "|---|" + "---|" * (len(names) + 1)]
    for found in rows:
        times = {name: found["engines"][name]["step_ms"] for name in (*names, "single")}
        least = min(times[name] for name in names if times[name])
        cells = [f"**{times[name]:.0f}**" if times[name] == least else f"{times[name]:.0f}" for name in names]
        lines.append(f"| {found['rate']} | {' | '.join(cells)} | {times['single']:.0f} |")
    sent = rows[0]["engines"]
    lines += [
        "",
        "A rank sends, in MiB a step: " + ", ".join(f"{n} {sent[n]['sent_bytes'] / 2**20:.2f}" for n in names),
    ]
    lines += ["", f"What the report of {rows[0]['rate']} expects:", "", *(f"- {line}" for line in rows[0]["expected"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "200mbit", "50mbit", "20mbit"])
    asked = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        for rate in asked.rates:
            hosts.shape(rate)
            rows.append(row(rate, compared(hosts, asked.data.resolve(), Path(folder) / rate)))
            print(rows[-1], flush=True)
            (asked.out / "rates.json").write_text(json.dumps(rows, indent=1) + "\n")
            (asked.out / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
