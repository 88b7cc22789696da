"""What --on-nan and --check-replicas cost a step; with --together the watchdog and checkpoints, too. As ratios.

    python benchmarks/checks.py [--together] [--rounds N] [--steps N] [--out FOLDER]

Two ranks over gloo train under `ddp`, in turns with each kind of check, in an order that each round begins elsewhere.
Of each figure the median over the rounds of the ratio to the turn without any is shown, with the quartiles. `control`
is the training without any once more: what the method reads where nothing differs. Exit code 0 whatever they are.

Without --together: the digits job, with steps of some milliseconds. Figures: a turn's fastest step, and the mean CPU
time of the thread that trains, which holds no wait for a core or another rank. The replicas are compared after each
step, so that their cost is seen; that of one in 1,000 steps is told, too.

With it: a small GPT and AdamW, with steps of a length that users have, and the three safeguards of `samestep run
--check-replicas 1000 --checkpoint-every 500s`: the heartbeat, which the parent looks at; one comparison of the replicas
a turn; one checkpoint a turn, written beside the training. Figures: the wall clock, and the CPU time of the whole
process, with the thread that writes. What one event costs is then spread over 1,000 steps, or 500 s. The flight
recorder cannot be turned off within a process: it is on in every turn, and heartbeat.py measures it.

Turns of one round are compared with each other, and the median over the rounds is taken, so that a machine that is busy
for a while falsifies little. How much is told: the quartiles of the sum, and what the same sum is of `control`, where
nothing differs. A sum below the goal holds where its upper quartile is below it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from samestep import Job
from samestep.engines import ddp
from samestep.jobs import charlm, digits
from samestep.launch import Machines
from samestep.launch.watchdog import POLL_S, Watchdog
from samestep.rank import flight_recorder
from samestep.rank.checkpoints import Checkpoints
from samestep.rank.guards import Guards
from samestep.rank.process_group import INIT_METHOD, checkpoint_store, process_group
from samestep.records.checkpoint import Interval
from samestep.training import Run
from samestep.world import World
from samestep.world.heartbeat import file_of, heartbeat
from samestep.world.processes import die_with_parent

WARM_UP = 5  # steps
ONCE = -1  # the replicas are compared once a turn, in its middle
STEPS_APART, SECONDS_APART = 1000, 500  # of the comparisons and the checkpoints that users have
WATCHED = "watched"  # a file in the folder: the parent is to look


@dataclass(frozen=True)
class Arm:
    """What a training has besides: checks, as of Run; a heartbeat, at which the parent looks; a checkpoint."""

    checks: Guards | None = None
    watched: bool = False
    saves: bool = False


ALONE = {
    "none": Arm(),
    "control": Arm(),
    "--on-nan stop": Arm(Guards("stop")),
    "--on-nan skip": Arm(Guards("skip")),
    "replicas compared every step": Arm(Guards("stop", 1)),
}
TOGETHER = {
    "none": Arm(),
    "control": Arm(),
    "watchdog": Arm(watched=True),
    "replicas compared once": Arm(Guards("stop", ONCE)),
    "one checkpoint": Arm(saves=True),
    "all three": Arm(Guards("stop", ONCE), watched=True, saves=True),
}
Seen = dict[str, dict[str, list[float]]]  # clock -> arm -> seconds a step, for each round


@dataclass(frozen=True)
class Asked:
    """The options."""

    together: bool
    rounds: int
    steps: int
    width: int
    folder: Path

    @property
    def arms(self) -> dict[str, Arm]:
        return TOGETHER if self.together else ALONE

    @property
    def timed(self) -> int:
        """The steps of a turn that are timed: not the last one, at which the replicas are compared once more."""
        return self.steps - 2 - WARM_UP

    def job(self) -> Job:
        """The job that is trained. For the GPT's text random characters will do."""
        if not self.together:
            return digits.job(width=self.width, global_batch=64)
        text = self.folder / "text"
        numbers = torch.randint(97, 123, (200_000,), generator=torch.Generator().manual_seed(0))
        if not text.exists():
            text.write_text(bytes(numbers.tolist()).decode())
        return charlm.job(text, global_batch=16, width=self.width, epochs=9)


class Timed(Run):
    """Notes the wall clock, and the CPU times of its thread and its process, after each step."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.stamps: list[tuple[float, float, float]] = []

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        super().step(loss, skipped=skipped)
        self.stamps.append((time.perf_counter(), time.thread_time(), time.process_time()))


@contextmanager
def heartbeat_of(arm: Arm, world: World, folder: Path) -> Iterator[None]:
    """Lets the parent look while a watched arm trains; the others' heartbeat writes nothing."""
    flag, silent = folder / WATCHED, ("begin", "step", "row")
    if arm.watched:
        if world.rank == 0:
            flag.touch()
        yield
        flag.unlink(missing_ok=True)
        return
    vars(heartbeat).update({name: lambda *_: None for name in silent})
    yield
    for name in silent:
        del vars(heartbeat)[name]


def turn(asked: Asked, job: Job, world: World, arm: Arm) -> tuple[dict[str, float], int]:
    """Trains one turn. Returns clock -> seconds a step, and the bytes of its checkpoint on this rank."""
    checks, checkpoints, saved = arm.checks, None, asked.folder / "checkpoints"
    if checks and checks.replicas == ONCE:
        checks = Guards(checks.on_nan, asked.steps // 2)
    if arm.saves:
        every = Interval(asked.steps // 2, "steps")
        checkpoints = Checkpoints(saved, world, checkpoint_store(), every=every, keep=1, resume="never")
    with heartbeat_of(arm, world, asked.folder):
        run = Timed(job, world, asked.steps, guards=checks, checkpoints=checkpoints)
        ddp.train(job, world, run)
    size = 0
    if checkpoints:
        checkpoints.close()
        if world.rank == 0:
            size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
            shutil.rmtree(saved)
    first, last = run.stamps[WARM_UP], run.stamps[-2]
    wall, thread, process = ((after - before) / asked.timed for before, after in zip(first, last))
    if asked.together:
        return {"wall clock": wall, "CPU time of the process": process}, size
    return {"fastest step": min(run.observations().step_s[WARM_UP:]), "CPU time": thread}, size


def rank_main(rank: int, asked: Asked) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ[INIT_METHOD] = f"file://{asked.folder}/rendezvous"
    world = World(rank=rank, size=2, local_size=2, local_rank=rank)
    heartbeat.open(file_of(asked.folder, rank))
    (asked.folder / f"pid-rank{rank}").write_text(f"{os.getpid()}@{os.uname().nodename}")
    flight_recorder.enable()
    job, names, seen, size = asked.job(), list(asked.arms), Seen(), 0
    with process_group(world):
        for number in range(asked.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                figures, bytes_here = turn(asked, job, world, asked.arms[name])
                size = max(size, bytes_here)
                for clock, figure in figures.items():
                    seen.setdefault(clock, {}).setdefault(name, []).append(figure)
    if rank == 0:
        of_model = sum(parameter.numel() for parameter in job.model().parameters())
        result = {"step_s": seen, "checkpoint_bytes": size, "parameters": of_model}
        (asked.folder / "result.json").write_text(json.dumps(result))


def train(asked: Asked) -> dict[str, Any]:
    """Trains all turns, and looks after the ranks as the command does. Returns what rank 0 has written."""
    ranks: Any = spawn(rank_main, (asked,), nprocs=2, join=False)
    watchdog, looked_s, looks = Watchdog(asked.folder, 2, Machines(), None), 0.0, 0
    while not ranks.join(POLL_S):
        if (asked.folder / WATCHED).exists():
            began = time.process_time()
            watchdog.check()
            looked_s, looks = looked_s + time.process_time() - began, looks + 1
    result: dict[str, Any] = json.loads((asked.folder / "result.json").read_text())
    return result | {"look_s": looked_s / max(1, looks)}


def median_of(of: Sequence[float], none: Sequence[float], how: Callable[[float, float], float]) -> tuple[float, str]:
    """Returns the median over the rounds of what `how` makes of an arm's figure and that without any, and quartiles."""
    low, middle, high = statistics.quantiles(map(how, of, none), n=4)
    return middle, f"{middle:.3f} times (quartiles {low:.3f} to {high:.3f})"


def lines_of(asked: Asked, result: dict[str, Any]) -> list[str]:
    """The table."""
    lines = [f"{asked.rounds} rounds of {asked.steps} steps, 2 ranks, {result['parameters']:,} parameters"]
    seen: Seen = result["step_s"]
    for clock, of in seen.items():
        lines.append(f"{clock}: {statistics.median(of['none']) * 1e3:.2f} ms a step without any")
        for name in list(of)[1:]:
            middle, said = median_of(of[name], of["none"], lambda with_it, plain: with_it / plain)
            lines.append(f"  {name:<29} {said}")
            if name == "replicas compared every step":
                lines.append(f"  {'replicas every 1,000 steps':<29} {1 + (middle - 1) / 1000:.5f} times, by that")
        if asked.together:
            lines += _spread(asked, of, result)
    return lines


def _spread(asked: Asked, of: dict[str, list[float]], result: dict[str, Any]) -> list[str]:
    """What events cost that come as seldom as users have them."""
    step_s = statistics.median(of["none"])

    def event_s(name: str) -> list[float]:
        """The quartiles of the seconds that an event adds to a turn."""
        return statistics.quantiles(((a - b) * asked.timed for a, b in zip(of[name], of["none"])), n=4)

    def shares(compared: float, saved: float) -> tuple[float, float, float]:
        return compared / STEPS_APART / step_s, saved / SECONDS_APART, result["look_s"] / POLL_S

    compared, saved, control = map(event_s, ("replicas compared once", "one checkpoint", "control"))
    low, middle, high = map(shares, compared, saved)
    nothing = [sum(shares(each, each)[:2]) for each in control]  # no looks
    megabytes = result["checkpoint_bytes"] / 1e6
    return [
        f"  a comparison takes {compared[1] * 1e3:.1f} ms: {middle[0]:.4%} where one comes in {STEPS_APART} steps",
        f"  a checkpoint of {megabytes:.0f} MB takes {saved[1] * 1e3:.0f} ms: {middle[1]:.4%} of {SECONDS_APART} s",
        f"  the parent's looks take {middle[2]:.4%} of one core",
        f"  together: {sum(middle):.4%} (quartiles {sum(low):.4%} to {sum(high):.4%})",
        f"  the same of control: {nothing[1]:.4%} (quartiles {nothing[0]:.4%} to {nothing[2]:.4%})",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--together", action="store_true", help="the watchdog and checkpoints, too, on longer steps")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--width", type=int, help="of the network (16; with --together 256)")
    parser.add_argument("--out", type=Path, help="keep the figures in this folder")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    with tempfile.TemporaryDirectory() as folder:
        width = given.width or (256 if given.together else 16)
        asked = Asked(given.together, given.rounds, given.steps, width, Path(folder))
        result = train(asked)
        lines = lines_of(asked, result)
    print("\n".join(lines))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "table.txt").write_text("\n".join(lines) + "\n")
        raw = {"torch": torch.__version__, "cores": os.cpu_count(), **result}
        (given.out / "raw.json").write_text(json.dumps(raw))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
