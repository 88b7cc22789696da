"""Kills a training -9 at random moments, continues it, and compares its end with that of one that nobody killed.

    python benchmarks/kills.py [--kills 20] [--engine ddp] [--nproc 2] [--launcher fork] [--seed 0]
                               [--out FOLDER]

One training writes a checkpoint after every second step. It is killed so many times: a rank, or the command with all of
its ranks, at a random moment; half of the kills wait until a checkpoint is being written. Each time the same command
continues it. A line for each kill: the steps done, the newest complete checkpoint, whether one was being written, and
the step at which the next launch went on. Exit 0 when every launch went on at the newest complete checkpoint, and the
weights are the same bytes. `--out` keeps kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

STEPS_AN_EPOCH, EPOCHS_A_KILL = 5, 10  # a step takes 20 ms at least: a launch is killed within some 75
JOB = f"{Path(__file__).parents[1]}/tests/resume/jobs_interrupted.py:slow"


@dataclass
class Kill:
    """One kill -9. after_s: since the first step of the launch. done: steps, as progress.json told last. complete: the
    newest checkpoint. writing: whether another one was being written. went_on_at: the next launch's first step."""

    what: str
    after_s: float
    done: int
    complete: int
    writing: bool
    went_on_at: int = -1


def newest(out: Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 without one."""
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def is_writing(out: Path) -> bool:
    return any((out / "checkpoints").glob(".step-*.part"))


def steps_done(out: Path) -> int:
    """Returns the steps that progress.json tells of; 0 where it tells none."""
    with suppress(OSError, ValueError):
        return json.loads((out / "progress.json").read_text()).get("done") or 0
    return 0


def epochs(options: argparse.Namespace) -> int:
    """Returns how long the training is, so that it does not end before its last kill."""
    return EPOCHS_A_KILL * (int(options.kills) + 2)


def launch(out: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Starts the training, or continues it."""
    line = [sys.executable, "-m", "samestep", "run", JOB, "--engine", options.engine, "--nproc", str(options.nproc)]
    line += ["--launcher", options.launcher, "--set", f"epochs={epochs(options)}"]
    line += ["--checkpoint-every", "2steps", "--keep", "2", "--out", str(out), "--json"]
    log = open(f"{out}.log", "ab")  # noqa: SIM115 - the process keeps it
    with suppress(FileNotFoundError):
        (out / "progress.json").unlink()
    return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)


def kill(process: subprocess.Popen[bytes], out: Path, draw: random.Random) -> Kill | None:
    """Kills a launch at a random moment. Returns None where it has ended before."""
    while process.poll() is None and not steps_done(out):
        time.sleep(0.01)
    began, wait_s, in_writing = time.monotonic(), draw.uniform(0.0, 1.5), draw.random() < 0.5
    while process.poll() is None and time.monotonic() - began < wait_s:
        time.sleep(0.005)
    while process.poll() is None and in_writing and not is_writing(out):
        time.sleep(0.0005)
    if process.poll() is not None:
        return None
    what = draw.choice(["a rank", "the command"])
    ranks = [int(path.read_text().partition("@")[0]) for path in sorted(out.glob("pid-rank*"))]
    seen = Kill(what, round(time.monotonic() - began, 3), steps_done(out), newest(out), is_writing(out))
    tree = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.kill(draw.choice(ranks) if what == "a rank" else process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(tree, timeout=60)
    seen.complete = newest(out)  # a checkpoint that was complete but for its name may have got it
    return seen


def went_on_at(process: subprocess.Popen[bytes], out: Path) -> int:
    """Returns the step at which the launch that runs has gone on, once it has; -1 where it has ended before."""
    told: dict[str, int] = {}
    while not told.get("done"):
        if process.poll() is not None:
            return -1
        time.sleep(0.01)
        with suppress(OSError, ValueError):
            told = json.loads((out / "progress.json").read_text())
    return told.get("resumed_from", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--launcher", default="fork", help="fork imports torch once, torchrun once for each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep kills.json in this folder")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="samestep-kills-") as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        assert launch(whole, options).wait() == 0, Path(f"{whole}.log").read_text()
        process = launch(killed, options)
        while len(kills) < options.kills and (seen := kill(process, killed, draw)):
            process = launch(killed, options)
            kills.append(seen)
            seen.went_on_at = went_on_at(process, killed)
            print(seen, flush=True)
        assert process.wait() == 0, Path(f"{killed}.log").read_text()
        same = (whole / "weights.safetensors").read_bytes() == (killed / "weights.safetensors").read_bytes()
    right = sum(each.went_on_at == each.complete for each in kills)
    said = f"{len(kills)} kills, {right} went on at the newest complete checkpoint; the same weights: {same}"
    print(said)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"engine": options.engine, "nproc": options.nproc, "launcher": options.launcher, "seed": options.seed}
        record |= {"said": said, "torch": version("torch"), "steps": STEPS_AN_EPOCH * epochs(options)}
        record |= {"same_weights": same, "kills": [asdict(each) for each in kills]}
        (options.out / "kills.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if same and right == len(kills) else 1


if __name__ == "__main__":
    raise SystemExit(main())
