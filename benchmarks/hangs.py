"""Hangs a training in each of many ways, and looks whether the right rank and the right line are named in time.

    python benchmarks/hangs.py [--trials 3 | --upto 20] [--faults model,gil] [--stall 3] [--ranks 3] [--engine ddp]
                              [--out FOLDER]

Each trial runs tests/launch/hanging.py, a job whose setting `fault` makes rank 1 hang, or all ranks for its sake. It
is right when the command exits with 1, names rank 1 and the marked line of the job, in at most 10 seconds after the
limit, and leaves no process. Of `shapes` the line alone counts: gloo ends a rank that receives data of another size,
at once, and that may be either rank. `slow` does not hang: its slowest step takes 2 seconds, and the command must end
well.

`far` and `link` train on two hosts, each with a network of its own (tests/cluster/hosts.py, which needs root), one rank
on each. `far`: rank 1 is asleep in the model, and the command on its host names rank 1 and the line; that on the other
host blames none of its own. `link`: the cable of one host is pulled out in the middle of the training. No rank is at
fault: the commands on both hosts say that none of theirs is behind, and point to the links, in at most 10 seconds after
the limit and the 30 that a machine gives the others to name their rank.

Prints the table; --out keeps it, with a line of trials.jsonl for each trial. Trials that are kept there count, too:
--upto 20 adds those that a fault lacks to 20, so that a record can be made in pieces. Exit code 1 when a trial is not
right.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cluster import hosts as hosts_module
from cluster.hosts import Hosts
from command import has_begun
from fork_servers import fork_servers
from samestep.launch.watchdog import ELSEWHERE_S

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
    "far": "asleep on the second machine",
    "link": "a link is cut",
}
ON_HOSTS = ("far", "link")
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
        if fault in ON_HOSTS:
            return trial_on_hosts(fault, options, Path(folder))
        command = [*line(fault, options), "--nproc", str(options.ranks)]
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


def line(fault: str, options: argparse.Namespace) -> list[str]:
    """Returns the command line that trains the job."""
    what = {"far": "model", "link": ""}.get(fault, fault)
    command = [sys.executable, "-m", "samestep", "run", f"{JOB}:job", "--set", f"fault={what}", "--out", "out"]
    return [*command, "--engine", options.engine, "--stall", f"{options.stall:g}"]


def trial_on_hosts(fault: str, options: argparse.Namespace, folder: Path) -> Trial:
    """Types one line on each of two hosts, and waits until both commands have ended."""
    typed = [*line(fault, options), "--set", "row_s=0.1", "--nnodes", "2", "--nproc", "1", "--master-addr", "h0"]
    hung = folder / "hung"
    with Hosts(2) as hosts, ThreadPoolExecutor(2) as pool:
        pipe = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": folder}
        commands = [hosts.start(i, [*typed, "--node-rank", str(i)], **pipe) for i in range(2)]
        said = [pool.submit(command.communicate, timeout=options.deadline) for command in commands]
        try:
            if fault == "link":
                while not has_begun(folder / "out" / "machine-h0") and commands[0].poll() is None:
                    time.sleep(0.1)
                hung.touch()
                hosts.cut(1)
            sentences = [(each.result()[1].strip().splitlines() or [""])[-1] for each in said]
        finally:
            for command in commands:
                command.kill()
        ended = time.time()
        left = sum(1 for _ in alive_in(str(folder)))
    late_s = ended - hung.stat().st_mtime - options.stall if hung.exists() else None
    codes = [command.returncode for command in commands]
    if fault == "far":
        blames_rank_0 = sentences[0].startswith("samestep: rank 0 ")
        blames_rank_1 = sentences[1].startswith(f"samestep: rank {BAD_RANK} ")
        who = blames_rank_1 and f": rank {BAD_RANK} (host h1, " in sentences[1] and not blames_rank_0
        where = any(f"{JOB.name}:{number}," in sentences[1] for number in marked_lines("model"))
    else:
        late_s = None if late_s is None else late_s - ELSEWHERE_S
        who = all(f"samestep: rank {i} has waited in " in sentences[i] for i in range(2))
        where = all("no rank of this machine is behind" in each and "the links to them" in each for each in sentences)
    told = " / ".join(sentences).replace(str(folder), "…")
    return Trial(fault, max(codes) if min(codes) > 0 else min(codes), who, where, late_s, left, told)


def alive_in(folder: str) -> Iterator[psutil.Process]:
    """Yields the processes whose current folder is the trial's."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == folder and process.pid != os.getpid():
                yield process


def table(trials: Iterable[Trial], options: argparse.Namespace) -> str:
    """Returns the table of all trials, a line for each fault."""
    where = f"{options.engine}, {options.launcher or 'torchrun'}, {options.ranks} ranks, {os.cpu_count()} cores"
    where += f"; on two hosts torchrun with a rank on each: {', '.join(FAULTS[fault] for fault in ON_HOSTS)}"
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


def to_try(kept: Sequence[Trial], options: argparse.Namespace) -> list[str]:
    """Returns the faults to try, in turns. Without root those that need hosts are left out, and told so."""
    faults = options.faults.split(",")
    if set(faults) & set(ON_HOSTS) and (why := hosts_module.missing()):
        print(f"left out, since {why}: {', '.join(ON_HOSTS)}", flush=True)
        faults = [fault for fault in faults if fault not in ON_HOSTS]
    if options.upto is None:
        return faults * int(options.trials)
    have = Counter(each.fault for each in kept)
    return [fault for turn in range(options.upto) for fault in faults if have[fault] <= turn]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--upto", type=int, help="instead of --trials: as many of each fault, with those of --out")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--stall", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--launcher", default="")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds of one trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = options.out / "trials.jsonl" if options.out else None
    trials = [Trial(**json.loads(row)) for row in kept.read_text().splitlines()] if kept and kept.exists() else []
    with fork_servers() if options.launcher == "fork" else nullcontext():
        for fault in to_try(trials, options):
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
