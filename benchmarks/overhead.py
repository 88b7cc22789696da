"""What does samestep's `ddp` engine cost, over a loop written by hand and against the wrappers?

    python benchmarks/overhead.py [--model small] [--model wide] [--rounds N] [--json FILE]

Every arm trains the digits job by itself, same network, optimizer, learning rates, rows per step, no loader workers
and one thread a rank: on CPU two ranks over gloo, with GPUs one rank each over NCCL. The arms take turns in blocks
of 20 steps within one process per rank, in an order that changes every round (arms.py says how), so that whatever
else the machine does meets all of them alike. An arm's time in a round is the mean of its block's steps on rank 0,
all but the first; arms are compared within a round, never across rounds.

Prints, for each model, the time per step of every arm, and for samestep against each other arm:
    added   microseconds a step that samestep takes more: the median over the rounds of (samestep - other)
    ratio   samestep's throughput over the other's, above 1 where samestep is faster: the median of (other / samestep)
each with a 95 % bootstrap interval over the rounds, and whether a goal is met: at least 0.995 of each handwritten
loop, at least 1.0 of each wrapper. 'met' when the whole interval is, 'not met' when none of it is, 'not resolved'
otherwise. `control` is the handwritten loop once more: its distance from `handwritten` is what the method itself adds.
--json writes every step's seconds, the machine and the versions. Exit code 0 whatever the verdicts are, 1 when an arm
failed or the deadline passed (every thread's stack is printed first).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import arms

ROUNDS = {"small": 100, "wide": 16}  # about a minute a model on two cores
GOALS = {"handwritten": 0.995, "handwritten_fast": 0.995, "lightning": 1.0, "fabric": 1.0, "accelerate": 1.0}
RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """(median, lower end, upper end) of what is added per step, and of the throughput ratio; and the verdict."""

    added_us: tuple[float, float, float]
    ratio: tuple[float, float, float]
    verdict: str


def compare(ours: NDArray[np.float64], other: NDArray[np.float64], goal: float) -> Comparison:
    """ours, other: seconds per step, one value a round, shape [rounds]; the same rounds in both."""
    added = interval((ours - other) * 1e6)
    ratio = interval(other / ours)
    verdict = "met" if ratio[1] >= goal else "not met" if ratio[2] < goal else "not resolved"
    return Comparison(added, ratio, verdict)


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """(median, lower, upper): the median over rounds and its 95 % bootstrap interval, from the percentiles."""
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def measure(model: str, names: list[str], rounds: int, block: int, deadline_s: float) -> dict[str, Any]:
    """Starts the ranks, waits for their end, returns what rank 0 saw."""
    gpus = torch.cuda.device_count()
    devices = ",".join(f"cuda:{number}" for number in range(gpus)) or "cpu,cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings = (devices, model, names, rounds, block, deadline_s, folder)
        torch.multiprocessing.spawn(arms.rank_main, settings, nprocs=len(devices.split(",")))
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def judge(measured: dict[str, Any]) -> dict[str, Comparison]:
    """samestep against every other arm; `control` against the loop that it repeats."""
    times = {name: np.array([np.mean(steps) for steps in arm["step_s"]]) for name, arm in measured["arms"].items()}
    found = {n: compare(times["samestep"], times[n], goal) for n, goal in GOALS.items() if n in times}
    if "control" in times and "handwritten" in times:
        found["control"] = compare(times["control"], times["handwritten"], 0.995)
    return found


def show(model: str, measured: dict[str, Any], found: dict[str, Comparison], console: Console) -> None:
    machine = measured["machine"]
    rounds, steps = np.shape(measured["arms"]["samestep"]["step_s"])
    table = Table("arm", "ms a step", "samestep adds, µs", "samestep / arm", "goal", "", title_justify="left")
    table.title = (
        f"{model} (width {arms.WIDTHS[model]}): {machine['ranks']} ranks, {machine['backend']}, "
        f"torch {machine['versions']['torch']}, {rounds} rounds of {steps} timed steps"
    )
    for name, arm in measured["arms"].items():
        row = [name, f"{np.median(np.mean(arm['step_s'], axis=1)) * 1e3:.3f}"]
        if name in found:
            c = found[name]
            row += ["{:+.0f} ({:+.0f} to {:+.0f})".format(*c.added_us), "{:.4f} ({:.4f} to {:.4f})".format(*c.ratio)]
            row += ["handwritten itself", ""] if name == "control" else [f"≥ {GOALS[name]}", c.verdict]
        table.add_row(*row)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(arms.WIDTHS), help="default: all")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--block", type=int, default=20, help="steps an arm takes in its turn")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds for one model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    console = Console(width=120)
    # One thread a rank; one allocator arena, or each arm's thread would have its own, unlike a script's main thread.
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    for name in filter(arms.absent, arms.ARMS):
        console.print(f"{name}: {arms.absent(name)} is not here; pip install -e '.[wrappers]'", markup=False)
    names = [name for name in arms.ARMS if not arms.absent(name)]
    models = {}
    for model in asked.model or arms.WIDTHS:
        began = time.monotonic()
        rounds = asked.rounds or ROUNDS[model]
        try:
            measured = measure(model, names, rounds, asked.block, asked.deadline)
        except torch.multiprocessing.ProcessException as error:
            print(f"{model}: {error}", file=sys.stderr)
            return 1
        found = judge(measured)
        show(model, measured, found, console)
        console.print(f"{time.monotonic() - began:.0f} s\n")
        models[model] = measured | {"comparisons": {name: asdict(c) for name, c in found.items()}}
    if asked.json:
        asked.json.write_text(json.dumps({"block": asked.block, "warm_up_blocks": arms.WARM_UP, "models": models}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
