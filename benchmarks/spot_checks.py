"""What one spot check (samestep run --spot-check) costs a training, spread over the 1,000 steps between two of them.

    python benchmarks/spot_checks.py [--rounds N] [--steps N] [--width N] [--out FOLDER]

Two ranks over gloo train an MLP under `ddp` with AdamW, in turns of some steps: without (`none`), without once more
(`control`) and with one step that is kept and replayed (`spot check`), in an order that each round begins elsewhere.
The process that replays runs beside the training, as in a run. Of each round the turns' wall clock and the CPU time of
the ranks' processes are compared with those of `none`; the median over the rounds and the quartiles are shown, as
a share of 1,000 steps. A check's own figures are told, too: how long the ranks were held up, and the CPU time of the
replay. The first check, with which the process starts, counts for no turn. Exit code 0 whatever they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.engine import Layout
from samestep.engines import ddp
from samestep.rank.process_group import INIT_METHOD, process_group
from samestep.rank.spot_check import ReplayProcess, SpotChecks
from samestep.records.spot_check import CHECKS, SpotCheckPlan, spot_checks_in
from samestep.training import Run
from samestep.world import World
from samestep.world.processes import die_with_parent

APART = 1000  # steps from one check to the next
ARMS = ("none", "control", "spot check")


def job(width: int = 1024, batch: int = 64) -> Job:
    """An MLP of about 10 width² parameters."""
    rows = torch.randn(1024, width, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(width, width), nn.ReLU())))

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=TensorDataset(rows, rows.flip(1)),
        global_batch=batch,
        epochs=1000,
    )


class OneCheck(SpotChecks):
    """Looks at the step in the middle of a turn."""

    def _is_due(self, step: int) -> bool:
        return step == self.steps // 2


class AllTurns(ReplayProcess):
    """Keeps the checks of the turns before."""

    def forget_checks(self) -> None:
        pass


class Timed(Run):
    """Notes the wall clock and this process's CPU time after each step."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.stamps: list[tuple[float, float]] = []

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        super().step(loss, skipped=skipped)
        self.stamps.append((time.perf_counter(), time.process_time()))


def train(rank: int, rounds: int, steps: int, width: int, folder: Path) -> None:
    """One rank."""
    die_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    world, small, replays = World(rank, 2, rank, 2), job(width), None
    if rank == 0:
        plan = SpotCheckPlan(
            f"{Path(__file__).resolve()}:job", {"width": str(width)}, Layout(2), 2, "cpu", str(folder / CHECKS)
        )
        replays = AllTurns(plan, folder)
    seconds: list[dict[str, Any]] = []
    with process_group(world):
        for number in range(-1, rounds):
            order = ARMS[number % 3 :] + ARMS[: number % 3]
            for arm in order if number >= 0 else ("spot check",):  # the first one starts the process
                checks = OneCheck(world, APART, steps=steps, folder=folder, replays=replays)
                # Steps of a turn are its own: the folder of the one before is removed when it is replayed.
                run = Timed(small, world, steps, spot_checks=checks if arm == "spot check" else None)
                ddp.ENGINE.train(small, world, run)
                checks.finish_writing()
                while (folder / f"step-{steps // 2}").exists():
                    time.sleep(0.1)
                (wall, cpu), (last_wall, last_cpu) = run.stamps[3], run.stamps[-1]
                if number >= 0:
                    seconds.append({"round": number, "arm": arm, "wall": last_wall - wall, "cpu": last_cpu - cpu})
    if replays:
        replays.close()
        (folder / "turns.json").write_text(json.dumps(seconds))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ[INIT_METHOD] = f"file://{folder}/rendezvous"
        spawn(train, (asked.rounds, asked.steps, asked.width, folder), nprocs=2)
        turns, checks = json.loads((folder / "turns.json").read_text()), spot_checks_in(folder / CHECKS)
    timed = asked.steps - 4
    figures: dict[str, Any] = {"step_s": statistics.median(t["wall"] for t in turns if t["arm"] == "none") / timed}
    for clock in ("wall", "cpu"):
        for arm in ARMS[1:]:
            extra = sorted(
                turn[clock] - next(t[clock] for t in turns if (t["round"], t["arm"]) == (turn["round"], "none"))
                for turn in turns
                if turn["arm"] == arm
            )
            base = statistics.median(t[clock] for t in turns if t["arm"] == "none") / timed * APART
            lower, _, upper = statistics.quantiles(extra, n=4)
            shares = {"median": statistics.median(extra) / base, "lower": lower / base, "upper": upper / base}
            figures[f"{arm}, {clock}"] = shares
            quartiles = f"({100 * lower / base:.3f} to {100 * upper / base:.3f})"
            print(f"{arm:12s} {clock:5s} {100 * shares['median']:7.3f} %  {quartiles}")
    later = checks[1:]
    figures["capture_s"] = statistics.median(check.capture_s for check in later)
    figures["replay_s"] = statistics.median(check.replay_s for check in later)
    print(", ".join(f"{name} {figures[name]:.3f}" for name in ("step_s", "capture_s", "replay_s")))
    print(f"verdicts: {[check.verdict for check in checks]}")
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        record = {"figures": figures, "turns": turns, "checks": [asdict(check) for check in checks]}
        (asked.out / "spot_checks.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
