"""What the tests of `make test`, `make check` and `make full` take, in units of what importing torch takes here.

    python benchmarks/lanes.py test|check|full [--out FOLDER]

It times the lane's pytest between imports of torch. `--out` keeps LANE.json: the seconds, what an import took before
and after, the processor's load before and after, how the tests ended, and the seconds of each file of tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Marks, the Makefile's options, and the goal in imports: of 8 and 15 minutes where one takes 1.5 s.
LANES = {
    "test": ("not check and not full", "PYTEST", 320),
    "check": ("check and not full", "PYTEST_CHECK", 600),
    "full": ("full", "PYTEST_CHECK", None),
}


def imports() -> list[float]:
    """Returns the seconds of three imports of torch, each in a process of its own."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        taken.append(time.perf_counter() - began)
    return taken


def seconds_of_files(output: str) -> dict[str, float]:
    """Returns file -> the seconds of its tests with their set-up, the longest first, from pytest's --durations=0."""
    found: dict[str, float] = defaultdict(float)
    for taken, file in re.findall(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/[^:\s]+)", output, re.M):
        found[file] += float(taken)
    return {file: round(found[file], 1) for file in sorted(found, key=lambda file: -found[file])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=LANES)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    marks, options, goal_imports = LANES[arguments.lane]
    (line,) = re.findall(rf"^{options} = (.*)$", (ROOT / "Makefile").read_text(), re.M)
    command = [sys.executable, "-m", "pytest", "-m", marks, *line.split(), "--durations=0"]
    before, load_before = imports(), os.getloadavg()[0]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    took = time.perf_counter() - began
    load_after, import_s = os.getloadavg()[0], before + imports()
    record = {
        "command": " ".join(["pytest", *command[3:]]),
        "ended": done.stdout.strip().splitlines()[-1].strip("= "),
        "exit": done.returncode,
        "seconds": round(took, 1),
        "import_s": [round(each, 2) for each in import_s],
        "imports": round(took / statistics.median(import_s), 1),
        "goal_imports": goal_imports,
        "load_before": load_before,
        "load_after": load_after,
        "cpus": os.cpu_count(),
        "seconds_of_files": seconds_of_files(done.stdout),
    }
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{arguments.lane}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(done.stdout)
    print({name: value for name, value in record.items() if name != "seconds_of_files"})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
