"""Damaged and hostile files, each in the place of a file that a command reads: what the command does.

    python benchmarks/hostile_files.py [--places record,weights] [--out FOLDER]

Trains once, and puts each kind of tests/hostile_files.py in the place of a record, a checkpoint, weights, data or a
pickle; then types the command that reads it. Counts what must not happen: code that was run, commands that hang,
tracebacks, and files that were lost. Exit code 1 where there is one. Prints a row for each, and writes all of them to
FOLDER/files.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hostile_files import ANY, CANARY, JSON, SAFETENSORS

DEADLINE_S = 60.0
Make = Callable[[Path], None]
JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


def model():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def job():
    rows = TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=rows,
        evaluation=rows,
        global_batch=4,
        epochs=2,
    )
"""
RUN = ("run", "job.py", "--engine", "single", "--nproc", "1")


def samestep(*words: str, folder: Path) -> tuple[int | None, str, float]:
    """Returns the exit code of a command, None where it hangs; what it printed; and its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "samestep", *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None, "", time.monotonic() - began
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace"), time.monotonic() - began


def cases() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(place, kind, the file in its folder, the command that reads it) of each."""
    for kind in (*ANY, *JSON):
        yield "record", kind, "past/study.json", ("runs", ".")
    for kind in ANY:
        yield "lock", kind, "past/.lock", ("runs", ".")
    for kind in (*ANY, *SAFETENSORS):
        yield "weights", kind, "w.safetensors", ("evaluate", "job.py", "--weights", "w.safetensors", "--nproc", "1")
    for kind in ("fifo", "link to /dev/zero", "pickle", "10 GB of zeros"):
        yield "CIFAR-10", kind, "data/data_batch_1", ("verify", "cifar10", "--set", "data=data", "--engines", "single")
    for kind in ("fifo", "folder", "link to /dev/zero", "10 GB after a brace", "deep lists", "a name twice"):
        for place in ("manifest.json", "rank0.json"):
            yield "checkpoint", kind, f"past/checkpoints/step-4/{place}", (*RUN, "--out", "past", "--resume", "auto")
    for kind in ("fifo", "link to /dev/zero", "deep names", "NaN"):
        yield "plan of check", kind, "first/script-plan.json", ("diff", "first", "first")


def fingerprint(folder: Path, but: Path) -> dict[str, str]:
    """The files that no command may lose: their digests, without the one that was put there."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path != but]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepare(folder: Path) -> None:
    """Writes what the cases start from: a run with checkpoints, weights, pickled batches, and a record's folder."""
    (folder / "job.py").write_text(JOB)
    stopped = (*RUN, "--out", "past", "--checkpoint-every", "2 steps", "--keep", "2")
    code, printed, _ = samestep(*stopped, folder=folder)
    if code != 0:
        raise SystemExit(printed)
    shutil.copy(folder / "past" / "weights.safetensors", folder / "w.safetensors")
    (folder / "past" / "weights.safetensors").unlink()
    (folder / "data").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
        (folder / "data" / name).write_bytes(pickle.dumps(batch))
    (folder / "first").mkdir()
    (folder / "precious").write_text("kept")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--places", default="", help="those of cases() to try, separated by commas; all if empty")
    options = parser.parse_args()
    out, places = options.out, [name for name in options.places.split(",") if name]
    rows = []
    kinds = ANY | JSON | SAFETENSORS
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        start = Path(scratch) / "start"
        start.mkdir()
        prepare(start)
        for number, (place, kind, file, words) in enumerate(
            case for case in cases() if not places or case[0] in places
        ):
            folder = Path(scratch) / str(number)
            shutil.copytree(start, folder)
            path = folder / file
            path.unlink(missing_ok=True)
            kinds[kind](path)
            before = fingerprint(folder, path)
            code, printed, seconds = samestep(*words, folder=folder)
            after = fingerprint(folder, path)
            # A continued run prunes the oldest of its own checkpoints, and writes its own records again.
            lost = [name for name, text in before.items() if after.get(name) != text and not name.startswith("past/")]
            row = {
                "place": place,
                "kind": kind,
                "code": code,
                "seconds": round(seconds, 2),
                "executed": any(folder.rglob(CANARY)),
                "hangs": code is None,
                "traceback": "Traceback" in printed,
                "lost": lost,
                "says": printed.strip().splitlines()[-1:],
            }
            rows.append(row)
            print(f"{place:14} {kind:28} exit {code}  {seconds:5.1f} s  {''.join(row['says'])[:90]}", flush=True)
            shutil.rmtree(folder)
    counts = {name: sum(bool(row[name]) for row in rows) for name in ("executed", "hangs", "traceback", "lost")}
    print({"files": len(rows)} | counts)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "files.json").write_text(json.dumps({"counts": counts, "files": rows}, indent=1))
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
