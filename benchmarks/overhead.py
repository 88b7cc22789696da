"""What does samestep's `ddp` engine cost, over a loop written by hand and against the wrappers?

    python benchmarks/overhead.py [--model small] [--model wide] [--rounds N] [--json FILE]

Every arm trains the digits job by itself, same network, optimizer, learning rates, rows per step, no loader workers
and one thread a rank: on CPU two ranks over gloo, each on its own core; with GPUs one rank each over NCCL. The arms
take turns in blocks of 20 steps within one process per rank, in an order that changes every round (turns.py says
how), so that whatever else the machine does meets all of them alike. They are compared within a round, never across
rounds, on rank 0. All of it is launched a few times over, because where an arm's tensors come to lie in memory moves
it by half a per cent. Our loader fetches a batch of this job by one indexing, torch's collates row by row:
`handwritten_fast` indexes too, so that it shows the loop's own cost; `handwritten` is the plain tutorial.

Prints, for each model, the time per step of every arm, and for samestep against each other arm:
    added   microseconds a step that samestep takes more: the median over the rounds of (samestep - other)
    ratio   samestep's throughput over the other's, above 1 where samestep is faster: the median of (other / samestep)
each with a 95 % bootstrap interval over launches and rounds, and whether a goal is met: at least 0.995 of each
handwritten loop, at least 1.0 of each wrapper. 'met' when the whole interval is, 'not met' when none of it is,
'not resolved' otherwise. `control` is the handwritten loop once more: what the method reads where nothing differs.
The first table is the verdict, the mean of each block's steps. Where ranks wait for a core it resolves a few per
cent; then the other two tell more: the fastest step of each block (not on GPUs, where only a block's ends are
synchronised), which holds no such wait, and the mean CPU time of the thread that trains, which holds no wait at all.

--json writes every step's seconds, the machine and the versions. Exit code 0 whatever the verdicts are, 1 when an arm
failed or the deadline passed (every thread's stack is printed first).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException, spawn

import arms

ROUNDS = {"small": 40, "wide": 6}  # of each of four launches: one to two minutes a model on two cores
GOALS = {"handwritten": 0.995, "handwritten_fast": 0.995, "lightning": 1.0, "fabric": 1.0, "accelerate": 1.0}
CLOCKS: dict[str, tuple[str, Callable[..., Any], str]] = {  # (what was noted, a block's figure, in words)
    "wall": ("wall_s", np.mean, "wall clock"),
    "fastest": ("wall_s", np.min, "wall clock, a block's fastest step"),
    "cpu": ("cpu_s", np.mean, "CPU time of the loop's thread"),
}
RESAMPLES = 2_000


@dataclass(frozen=True)
class Comparison:
    """(median, lower end, upper end) of what is added per step, and of the throughput ratio; and the verdict."""

    added_us: tuple[float, float, float]
    ratio: tuple[float, float, float]
    verdict: str


def compare(ours: NDArray[np.float64], other: NDArray[np.float64], goal: float) -> Comparison:
    """ours, other: seconds per step, one value a round, shape [launches, rounds]; the same rounds in both."""
    added = interval((ours - other) * 1e6)
    ratio = interval(other / ours)
    verdict = "met" if ratio[1] >= goal else "not met" if ratio[2] < goal else "not resolved"
    return Comparison(added, ratio, verdict)


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """(median, lower, upper) of `values`, shape [launches, rounds]: the median and its 95 % bootstrap interval.

    Draws launches, then rounds of each: where a launch puts an arm's tensors in memory is a part of the noise.
    """
    draw, (launches, rounds) = np.random.default_rng(0), values.shape
    of_launch = draw.integers(launches, size=(RESAMPLES, launches, 1))
    of_round = draw.integers(rounds, size=(RESAMPLES, launches, rounds))
    low, high = np.percentile(np.median(values[of_launch, of_round], axis=(1, 2)), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def measure(model: str, names: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks, waits for their end; a few times over. Returns what rank 0 saw, launch by launch."""
    gpus = torch.cuda.device_count()
    devices = ",".join(f"cuda:{number}" for number in range(gpus)) or "cpu,cpu"
    launches = []
    for number in range(asked.launches):
        with tempfile.TemporaryDirectory() as folder:
            order = random.Random(number).sample(names, len(names))  # who comes first in memory
            settings = (devices, model, order, asked.rounds or ROUNDS[model], asked.block, asked.deadline, folder)
            spawn(arms.rank_main, settings, nprocs=len(devices.split(",")))
            launches.append(json.loads(Path(folder, "result.json").read_text()))
    per_arm = {name: [launch["arms"][name] for launch in launches] for name in names}
    return {"machine": launches[0]["machine"], "arms": per_arm}


def seconds(measured: dict[str, Any], name: str, clock: str) -> NDArray[np.float64]:
    """An arm's seconds per step, shape [launches, rounds]. clock: one of CLOCKS."""
    noted, figure, _ = CLOCKS[clock]
    return np.asarray(figure([launch[noted] for launch in measured["arms"][name]], axis=2))


def judge(measured: dict[str, Any], clock: str) -> dict[str, Comparison]:
    """samestep against every other arm; `control` against the loop that it repeats."""
    times = {name: seconds(measured, name, clock) for name in measured["arms"]}
    found = {n: compare(times["samestep"], times[n], goal) for n, goal in GOALS.items() if n in times}
    return found | {"control": compare(times["control"], times["handwritten"], GOALS["handwritten"])}


def show(title: str, measured: dict[str, Any], clock: str, found: dict[str, Comparison], console: Console) -> None:
    table = Table("arm", "ms a step", "samestep adds, µs", "samestep / arm", "goal", title_justify="left")
    table.title = f"{title}: {CLOCKS[clock][2]}"
    for name in measured["arms"]:
        cells = [name, f"{np.median(seconds(measured, name, clock)) * 1e3:.3f}"]
        if name in found:
            c = found[name]
            cells += ["{:+.0f} ({:+.0f} to {:+.0f})".format(*c.added_us), "{:.3f} ({:.3f} to {:.3f})".format(*c.ratio)]
            cells += ["(handwritten, twice)" if name == "control" else f"≥ {GOALS[name]}: {c.verdict}"]
        table.add_row(*cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(arms.WIDTHS), help="default: all")
    parser.add_argument("--rounds", type=int, help=f"of each launch, default: {ROUNDS}")
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--block", type=int, default=20, help="steps an arm takes in its turn")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds for one launch")
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
        try:
            measured = measure(model, names, asked)
        except ProcessException as error:
            print(f"{model}: {error}", file=sys.stderr)
            return 1
        on = measured["machine"]
        title = f"{model} model, {on['ranks']} ranks, {on['backend']}, torch {on['versions']['torch']}"
        models[model] = measured | {"comparisons": {}}
        for clock in CLOCKS:
            if clock == "fastest" and on["gpu"]:
                continue
            found = judge(measured, clock)
            show(title, measured, clock, found, console)
            models[model]["comparisons"][clock] = {name: asdict(c) for name, c in found.items()}
        console.print(f"{time.monotonic() - began:.0f} s\n")
    if asked.json:
        text = json.dumps({"block": asked.block, "models": models}, separators=(",", ":"))
        # A step of milliseconds to 0.1 µs, which is less than the clock's own noise: half the size.
        asked.json.write_text(re.sub(r"\d\.\d{5,}(e-\d+)?", lambda figure: f"{float(figure[0]):.5g}", text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
