"""What --on-nan and --check-replicas cost a step, as ratios to a training without them.

    python benchmarks/checks.py [--rounds N] [--steps N] [--out FOLDER]

Two ranks over gloo train the digits job under `ddp`, in turns with each kind of check, in an order that each round
begins elsewhere. Two figures a turn: its fastest step, and the mean CPU time of the thread that trains, which holds no
wait for a core or another rank. Of each the median over the rounds of the ratio to the turn without any is shown, with
the quartiles. `control` is the training without any once more: what the method reads where nothing differs. The
replicas are compared after each step here, so that their cost is seen; that of one in 1,000 steps is told, too.
Exit code 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from samestep.engines import ddp
from samestep.jobs import digits
from samestep.rank.group import INIT_METHOD, process_group
from samestep.rank.not_finite import Checks
from samestep.training import Run
from samestep.world import World
from samestep.world.orphans import die_with_parent

ARMS = {
    "none": None,
    "control": None,
    "--on-nan stop": Checks("stop"),
    "--on-nan skip": Checks("skip"),
    "replicas compared every step": Checks("stop", 1),
}
WARM_UP = 5  # steps
CLOCKS = ("fastest step", "CPU time")


class Timed(Run):
    """Notes the CPU time of its thread after each step."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.cpu_s: list[float] = []

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        super().step(loss, skipped=skipped)
        self.cpu_s.append(time.thread_time())


def rank_main(rank: int, rounds: int, steps: int, width: int, folder: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ[INIT_METHOD] = f"file://{folder}/rendezvous"
    world = World(rank=rank, size=2, local_size=2, local_rank=rank)
    job = digits.job(width=width, global_batch=64)
    names, seen = list(ARMS), {clock: {name: list[float]() for name in ARMS} for clock in CLOCKS}
    with process_group(world):
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                run = Timed(job, world, steps, checks=ARMS[name])
                ddp.train(job, world, run)
                seen["fastest step"][name].append(min(run.observations().step_s[WARM_UP:]))
                seen["CPU time"][name].append((run.cpu_s[-1] - run.cpu_s[WARM_UP]) / (steps - 1 - WARM_UP))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(seen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--width", type=int, default=16, help="of the network: 16 takes some milliseconds a step")
    parser.add_argument("--out", type=Path, help="keep the figures in this folder")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (asked.rounds, asked.steps, asked.width, folder), nprocs=2)
        seen: dict[str, dict[str, list[float]]] = json.loads(Path(folder, "result.json").read_text())
    lines = [f"{asked.rounds} rounds of {asked.steps} steps, 2 ranks"]
    for clock, of in seen.items():
        lines.append(f"{clock}: {statistics.median(of['none']) * 1e3:.2f} ms a step without any")
        for name in list(ARMS)[1:]:
            ratios = [with_it / plain for with_it, plain in zip(of[name], of["none"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            lines.append(f"  {name:<29} {middle:.3f} times (quartiles {low:.3f} to {high:.3f})")
            if name.startswith("replicas"):
                lines.append(f"  {'replicas every 1,000 steps':<29} {1 + (middle - 1) / 1000:.5f} times, by that")
    print("\n".join(lines))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "table.txt").write_text("\n".join(lines) + "\n")
        raw = {"torch": torch.__version__, "cores": os.cpu_count(), "step_s": seen}
        (asked.out / "raw.json").write_text(json.dumps(raw))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
