"""Hangs a training in each of many ways, and looks whether the right rank and the right line are named in time.

    python benchmarks/hangs.py [--trials 3] [--faults model,gil] [--stall 3] [--ranks 3] [--engine ddp] [--out FOLDER]

Each trial runs tests/launch/hanging.py, a job whose setting `fault` makes rank 1 hang, or all ranks for its sake. It
is right when the command exits with 1, names rank 1 and the marked line of the job, in at most 10 seconds after the
limit, and leaves no process. Of `shapes` the line alone counts: gloo ends a rank that receives data of another size,
at once, and that may be either rank. `slow` does not hang: its slowest step takes 2 seconds, and the command must end
well.
Prints the table; --out keeps it, with a line of trials.jsonl for each trial. Exit code 1 when a trial is not right.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fork_servers import fork_servers

JOB = Path(__file__).parents[1] / "tests" / "launch" / "hanging.py"
FAULTS = {
    "dataset": "asleep in the dataset",
    "worker": "asleep in a loader worker",
    "model": "asleep in the model",
    "evaluation": "asleep in an evaluation",
    "loop": "endless loop in the model",
    "early": "one rank returns early",
    "branch": "another branch on one rank",
    "collective": "one barrier more on one rank",
    "operation": "another operation on one rank",
    "shapes": "another shape on one rank",
    "stop": "SIGSTOP",
    "gil": "holds the GIL",
    "lock": "takes a lock twice",
    "slow": "merely slow",
}
BAD_RANK = 1
WITHIN_S = 10.0  # after the limit


@dataclass(frozen=True)
class Trial:
    """late_s: from the limit to the command's end, with everything that it ends. left: processes that live on."""

    fault: str
    code: int
    right_rank: bool
    right_line: bool
    late_s: float | None
    left: int
    said: str

    @property
    def is_right(self) -> bool:
        if self.fault == "slow":
            return self.code == 0
        in_time = self.late_s is not None and self.late_s <= WITHIN_S
        right_rank = self.right_rank or self.fault == "shapes"
        return self.code == 1 and right_rank and self.right_line and in_time and not self.left


def marked_lines(fault: str) -> list[int]:
    """Returns the lines of the job at which a fault hangs: one, or one on each side."""
    lines = enumerate(JOB.read_text().splitlines(), 1)
    return [number for number, line in lines if fault in line.partition("# hangs: ")[2].split(", ")]


def trial(fault: str, options: argparse.Namespace) -> Trial:
    """Runs one command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "samestep", "run", f"{JOB}:job", "--set", f"fault={fault}", "--out", "out"]
        command += ["--engine", options.engine, "--nproc", str(options.ranks), "--stall", f"{options.stall:g}"]
        command += ["--launcher", options.launcher] if options.launcher else []
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=options.deadline)
        ended = time.time()
        hung = Path(folder) / "hung"
        late_s = ended - hung.stat().st_mtime - options.stall if hung.exists() else None
        left = sum(1 for _ in alive_in(folder))
    said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    who = said.removeprefix("samestep: ").startswith(f"rank {BAD_RANK} ")
    where = any(f"{JOB.name}:{line}," in said for line in marked_lines(fault))
    return Trial(fault, done.returncode, who, where, late_s, left, said.replace(folder, "…"))


def alive_in(folder: str) -> Iterator[psutil.Process]:
    """Yields the processes whose current folder is the trial's."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == folder and process.pid != os.getpid():
                yield process


def table(trials: Iterable[Trial], options: argparse.Namespace) -> str:
    """Returns the table of all trials, a line for each fault."""
    where = f"{options.engine}, {options.launcher or 'torchrun'}, {options.ranks} ranks, {os.cpu_count()} cores"
    lines = [
        f"{where}, --stall {options.stall:g}",
        f"{'fault':32}{'trials':>7}{'rank':>6}{'line':>6}{'right':>7}{'s after the limit: median':>27}{'max':>6}",
    ]
    every = list(trials)
    for fault, words in FAULTS.items():
        of = [each for each in every if each.fault == fault]
        if not of:
            continue
        late = [each.late_s for each in of if each.late_s is not None and fault != "slow"]
        seconds = f"{statistics.median(late):27.1f}{max(late):6.1f}" if late else ""
        ranks, lines_right = (sum(getattr(each, name) for each in of) for name in ("right_rank", "right_line"))
        shown = ("", "") if fault == "slow" else (ranks, lines_right)
        lines.append(f"{words:32}{len(of):7}{shown[0]:>6}{shown[1]:>6}{sum(t.is_right for t in of):7}{seconds}")
    lines.append(f"right: {sum(each.is_right for each in every)} of {len(every)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--stall", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--launcher", default="")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds of one trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trials: list[Trial] = []
    with fork_servers() if options.launcher == "fork" else nullcontext():
        for fault in options.faults.split(",") * options.trials:
            trials.append(trial(fault, options))
            print(f"{'right' if trials[-1].is_right else 'WRONG'}  {fault}: {trials[-1].said}", flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                with open(options.out / "trials.jsonl", "a") as file:
                    print(json.dumps(asdict(trials[-1])), file=file)
    print(table(trials, options))
    if options.out:
        (options.out / "table.txt").write_text(table(trials, options) + "\n")
    return 0 if all(each.is_right for each in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
