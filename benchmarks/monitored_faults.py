"""Puts `samestep monitor` in front of trainings with faults, and looks whether it names the right rank and line.

    python benchmarks/monitored_faults.py [--upto 20] [--faults sleep,slow_data] [--out FOLDER]
    python benchmarks/monitored_faults.py --cost 5 [--out FOLDER]
    python benchmarks/monitored_faults.py --healthy 600 [--out FOLDER]

Each trial runs tests/launch/monitored.py under torchrun on two processes; its fault is rank 1's. A hang is right when
the sentence begins with the right rank, names the marked line, and comes at most 10 seconds after the limit; any other
fault, when its sentence is said and no other; a healthy training, when none is. --cost trains a loop with and without
the monitor in turn, so many times, and prints the ratio of its steps' times. --healthy trains for so many seconds.

Prints the table; --out keeps a line of trials.jsonl for each trial. Trials that are kept there count: --upto 20 adds
those that a fault lacks to 20, so that a record can be made in pieces. Exit code 1 when a trial is not right.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "launch" / "monitored.py"
STALL_S = 8.0
WITHIN_S = 10.0
WAITS = "rank 1 has not entered all_reduce "
# fault -> how the sentence about it begins, and a part of it; how many steps are trained
FAULTS: dict[str, tuple[str, str, int]] = {
    "sleep": (WAITS, "asleep", 12),
    "loop": (WAITS, "running", 12),
    "lock": (WAITS, "asleep", 12),
    "dataset": (WAITS, "loading a batch", 12),
    "worker": (WAITS, "in its loader worker", 12),
    "early": (WAITS, "", 12),
    "stop": ("rank 1 is stopped", "", 12),
    "branch": ("rank 1 has waited for ", "while rank 0 waits in all_reduce", 12),
    "error": ("rank 1 failed first: ValueError: a wrong row", "", 12),
    "kill": ("rank 1 ended first", "without an exception", 12),
    "slow_compute": ("rank 1 is slow", "it computes for ", 150),
    "slow_data": ("rank 1 is slow", "ms a step for data", 200),
    "loader": ("the training waits ", "num_workers=", 200),
    "leak": ("the memory of rank ", "has grown", 200),
    "none": ("", "", 300),
    "evaluation": ("", "", 12),
}
STEP_S = {"leak": 0.05, "none": 0.04}
STEPS_OF_CLOCK = {0.0: 2000, 0.015: 300}  # what a step computes beside its model, in seconds -> how many steps
HANGS = ("sleep", "loop", "lock", "dataset", "worker", "early", "stop", "branch")
USAGE = re.compile("used |the whole machine|samples: |the command is ended|ended \\d+ process")


@dataclass(frozen=True)
class Trial:
    """late_s: of a hang, from the limit to the sentence. said: about the ranks."""

    fault: str
    code: int
    said: list[str]
    late_s: float | None
    seconds: float

    @property
    def is_right(self) -> bool:
        begins, part, _ = FAULTS[self.fault]
        if not begins:
            return self.code == 0 and not self.said
        at = lines_of(self.fault) if self.fault in HANGS and self.fault != "early" else []
        right = [line for line in self.said if line.startswith(begins) and part in line]
        named = bool(right) and all(f"{SCRIPT.name}:{number}, " in right[0] for number in at)
        in_time = self.fault not in HANGS or (self.late_s is not None and self.late_s <= WITHIN_S)
        return named and in_time and len(right) == len(self.said)


def lines_of(fault: str) -> list[int]:
    """Returns the lines of the script that must be named for a fault."""
    lines = enumerate(SCRIPT.read_text().splitlines(), 1)
    return [number for number, line in lines if fault in line.partition("# at: ")[2].split(", ")]


def launch(fault: str, steps: int, step_s: float) -> list[str]:
    """Returns the command that trains the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    return [*command, fault, str(steps), str(step_s)]


def trial(fault: str, steps: int | None = None) -> Trial:
    """Runs one training under the monitor to its end."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--stall", str(STALL_S), "--end-hung"] if fault in HANGS else []
        command = [sys.executable, "-m", "samestep", "monitor", "--out", "out", *options, "--"]
        command += launch(fault, steps or FAULTS[fault][2], STEP_S.get(fault, 0.0))
        began = time.time()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3600 if steps else 300)
        report, hung = Path(folder) / "out" / "hang.txt", Path(folder) / "hung"
        both = report.exists() and hung.exists()
        late_s = report.stat().st_mtime - float(hung.read_text()) - STALL_S if both else None
    lines = [line.removeprefix("samestep: ") for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    said = list(dict.fromkeys(line for line in lines if not USAGE.match(line)))
    return Trial(fault, done.returncode, said, late_s, round(time.time() - began, 1))


@dataclass(frozen=True)
class Clock:
    """What a step of rank 0 took. cpu_ms: of these, on a processor, all its threads together. monitor_ms: that the
    command samestep monitor itself was on a processor in the time of a step."""

    wall_ms: float
    cpu_ms: float
    monitor_ms: float | None


def clock(monitored: bool, steps: int, step_s: float) -> Clock:
    """Trains a loop with the monitor or without."""
    with tempfile.TemporaryDirectory() as folder:
        command = launch("clock", steps, step_s)
        if monitored:
            command = [sys.executable, "-m", "samestep", "monitor", "--out", "out", "--", *command]
        process = psutil.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        looks, started = list[tuple[float, float]](), Path(folder) / "hung"
        assert process.stdout
        while process.poll() is None and not select.select([process.stdout], [], [], 0.1)[0]:
            if started.exists():
                times = process.cpu_times()
                looks.append((time.monotonic(), times.user + times.system))
        output = process.communicate()[0]
    wall_ms, cpu_ms = map(float, re.findall(r"a step took (\S+) ms, of these (\S+) on", output)[0])
    if not monitored:
        return Clock(wall_ms, cpu_ms, None)
    share = (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])
    return Clock(wall_ms, cpu_ms, share * wall_ms)


def cost(pairs: int, kept: Path | None) -> None:
    """Trains with and without the monitor in turn: a loop of as short steps as there are, and one that computes."""
    found: dict[float, list[tuple[Clock, Clock]]] = {step_s: [] for step_s in STEPS_OF_CLOCK}
    for pair in range(pairs):
        for step_s, steps in STEPS_OF_CLOCK.items():
            first = clock(pair % 2 == 0, steps, step_s)
            second = clock(pair % 2 == 1, steps, step_s)
            found[step_s].append((first, second) if pair % 2 == 0 else (second, first))
        for took in found.values():
            print(f"{len(took)} pairs, a step of {statistics.median(other.wall_ms for _, other in took):.3f} ms:")
            print_ratio("  its time", [one.wall_ms / other.wall_ms for one, other in took])
            print_ratio("  on a processor", [one.cpu_ms / other.cpu_ms for one, other in took])
            print_ratio("  of a core, the command", [(one.monitor_ms or 0.0) / one.wall_ms for one, _ in took])
        if kept:
            pairs_of = {step_s: [[asdict(one), asdict(other)] for one, other in took] for step_s, took in found.items()}
            kept.write_text(json.dumps(pairs_of) + "\n")


def print_ratio(what: str, ratios: list[float]) -> None:
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    text = f"{what}: {statistics.median(ratios):.4f}, {draws[50]:.4f} to {draws[-51]:.4f} in 95 of 100 draws"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--upto", type=int, default=1)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--cost", type=int, default=0)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = options.out / "trials.jsonl" if options.out else None
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.cost:
        cost(options.cost, options.out / "cost.json" if options.out else None)
        return
    if options.healthy:
        done = trial("none", steps=int(options.healthy / 0.045))
        print(done.seconds, "s:", done.said or "nothing was said of the ranks")
        if options.out:
            (options.out / "healthy.json").write_text(json.dumps(asdict(done)) + "\n")
        sys.exit(not done.is_right)
    trials = [Trial(**json.loads(line)) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    for number in range(options.upto):
        for fault in options.faults.split(","):
            if sum(each.fault == fault for each in trials) <= number:
                trials.append(trial(fault))
                print(
                    f"{'' if trials[-1].is_right else 'WRONG '}{fault}: {trials[-1].said} {trials[-1].late_s}",
                    flush=True,
                )
                if kept:
                    with open(kept, "a") as file:
                        file.write(json.dumps(asdict(trials[-1])) + "\n")
    for fault in FAULTS:
        own = [each for each in trials if each.fault == fault]
        late = [each.late_s for each in own if each.late_s is not None]
        right = sum(each.is_right for each in own)
        print(f"{fault:14} {right} of {len(own)}" + (f", at most {max(late):.1f} s after the limit" if late else ""))
    sys.exit(not all(each.is_right for each in trials))


if __name__ == "__main__":
    main()
