"""What `samestep verify --as threads` takes, and what it says, at several numbers of ranks.

    python benchmarks/threads.py --out results/threads_2cpu_DATE [--job digits] [--ranks 2 3 …] [--engines ddp fsdp]

Writes ENGINE.json: for each number of ranks the seconds by the clock and of the processors (the command and
all that it has started), the machine's load, and the verdict. At 2, 3 and 4 ranks also as processes.
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
from pathlib import Path
from typing import Any

AS_PROCESSES = (2, 3, 4)


def verified(job: str, engine: str, ranks: int, ranks_as: str) -> dict[str, Any]:
    """Runs one proof, and returns its row."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        line = ["verify", job, "--engine", engine, "--nproc", str(ranks), "--as", ranks_as, "--json"]
        command = [sys.executable, "-m", "samestep", *line, "--out", f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, Any] = {"job": job, "engine": engine, "ranks": ranks, "as": ranks_as, "exit": done.returncode}
    row |= {"seconds": round(seconds, 1), "load": os.getloadavg()[0]}
    row["cpu_seconds"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    if not done.stdout:
        return row | {"stderr": done.stderr[-500:]}
    (found,) = json.loads(done.stdout)["engines"]
    return row | {key: found[key] for key in ("verdict", "bitwise", "max_difference", "bound")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", default="digits")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 5, 8, 16, 32, 64])
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for engine in options.engines:
        rows: list[dict[str, Any]] = []
        cases = [("threads", ranks) for ranks in options.ranks]
        cases += [("processes", ranks) for ranks in AS_PROCESSES if ranks <= max(options.ranks)]
        for ranks_as, ranks in cases:
            rows.append(verified(options.job, engine, ranks, ranks_as))
            print(rows[-1], flush=True)
            (options.out / f"{engine}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
