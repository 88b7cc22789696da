"""Damages checkpoints and disks of trainings, and looks whether each goes on and ends as the undamaged one.

    python benchmarks/checkpoint_faults.py [--only WORDS] [--seed 0] [--out FOLDER]

Between two launches: a training of two ranks that writes a checkpoint after every fourth step is killed -9. Of each of
its copies the newest checkpoint is damaged in another way, and the same command continues it. While it trains: the
checkpoints of another training are removed, or its disk, a tmpfs of 1 MB, is filled; room is made before its last step.

A line for each: what was said, the newest checkpoint that was intact, the step at which the training went on, whether
the older checkpoints are the same bytes, and whether the weights at the end are those of the undamaged training. Exit 0
when all are as they should be. `--out` keeps trials.json. A disk of its own needs root: without, these trials are
skipped, and told so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW, GATED = f"{ROOT}/tests/resume/jobs_interrupted.py:slow", f"{ROOT}/tests/jobs/gated.py:job"
EVERY = ("--set", "epochs=12", "--checkpoint-every", "4steps")
LIMIT_S = 240.0  # for a command: it only ends what hangs
DISKS = (
    "the disk is full",
    "the disk becomes full in the middle of a checkpoint",
    "the folder of checkpoints removed",
    "the run's folder removed",
)
Damage = Callable[[Path], object]


@dataclass
class Trial:
    """One fault. code: the command's exit code. intact: the newest checkpoint that is not damaged. went_on_at: the step
    at which it continued; of a training that was not interrupted its newest checkpoint before the end. old_intact:
    whether the older checkpoints have the same bytes. said: the sentences about it. right: whether all is as it should.
    """

    fault: str
    code: int
    intact: int
    went_on_at: int
    old_intact: bool
    same_weights: bool
    said: list[str]
    right: bool = False


def checkpoints_of(out: Path) -> dict[int, dict[str, bytes]]:
    """Returns step -> file -> its bytes; the newest last."""
    folders = {int(path.name.removeprefix("step-")): path for path in (out / "checkpoints").glob("step-*")}
    return {step: {path.name: path.read_bytes() for path in folders[step].iterdir()} for step in sorted(folders)}


def flip(name: str, draw: random.Random, checkpoint: Path) -> None:
    """Flips one bit of a file."""
    content = bytearray((checkpoint / name).read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    (checkpoint / name).write_bytes(content)


def cut(name: str, draw: random.Random, checkpoint: Path) -> None:
    """Truncates a file."""
    os.truncate(checkpoint / name, draw.randrange((checkpoint / name).stat().st_size))


def newer(checkpoint: Path) -> None:
    """Raises the manifest's schema number."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"schema": manifest["schema"] + 1}))


def half_written(checkpoint: Path) -> None:
    """Puts beside a checkpoint what a kill leaves of the next one."""
    ignored = shutil.ignore_patterns("manifest.json", "rank1.json")
    shutil.copytree(checkpoint, checkpoint.with_name(".step-999.part"), ignore=ignored)


def damages(draw: random.Random) -> dict[str, Damage]:
    """Returns fault -> what does it to the newest checkpoint."""
    faults: dict[str, Damage] = {}
    for name in ("rank0.safetensors", "rank0.json", "rank1.json", "manifest.json"):
        faults[f"{name} truncated"] = partial(cut, name, draw)
        faults[f"a bit of {name} flipped"] = partial(flip, name, draw)
    return faults | {
        "rank1.json missing": lambda checkpoint: (checkpoint / "rank1.json").unlink(),
        "manifest.json missing": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
        "a newer schema": newer,
        "a half-written one beside it": half_written,
        "the newest removed": shutil.rmtree,
        "all removed": lambda checkpoint: shutil.rmtree(checkpoint.parent),
    }


def line(job: str, out: Path, *more: str) -> list[str]:
    own = ["--engine", "ddp", "--nproc", "2", "--launcher", "fork", "--out", str(out), *more]
    return [sys.executable, "-m", "samestep", "run", job, *own]


def run(job: str, out: Path, *more: str) -> tuple[int, list[str]]:
    """Runs a training to its end. Returns its exit code, and what it said of checkpoints and disks."""
    done = subprocess.run(line(job, out, *more), capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, sentences(done.stderr)


def sentences(stderr: str) -> list[str]:
    words = ("checkpoint", "cannot be written", "another training", "Traceback")
    return [text for text in stderr.splitlines() if any(word in text for word in words)]


def wait(until: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Waits until something is so. Raises RuntimeError where the command has ended before."""
    began = time.monotonic()
    while not until():
        if process.poll() is not None or time.monotonic() - began > LIMIT_S:
            raise RuntimeError("the training has ended, or does not go on")
        time.sleep(0.005)


def interrupted(out: Path, *more: str) -> None:
    """Trains into `out`, and kills the command with -9 when it has written three checkpoints."""
    with open(f"{out}.log", "wb") as log:
        process = subprocess.Popen(line(SLOW, out, *more), stdout=log, stderr=log)
    wait(lambda: len(list(out.glob("checkpoints/step-*"))) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in out.glob("pid-rank*"):  # they end by themselves, after the command
        while Path(f"/proc/{path.read_text().partition('@')[0]}").exists():
            time.sleep(0.01)
    for path in out.glob("collectives-rank*"):  # sockets, which cannot be copied
        path.unlink()


def between(fault: str, damage: Damage, killed: Path, folder: Path, expected: bytes) -> Trial:
    """Damages the newest checkpoint of a copy of an interrupted training, and continues it."""
    out = folder / "copy"
    shutil.rmtree(out, ignore_errors=True)  # of a trial that did not end
    shutil.copytree(killed, out)
    older = checkpoints_of(out)
    newest = max(older)
    damage(out / "checkpoints" / f"step-{newest}")
    if "half-written" not in fault:
        del older[newest]
    if fault == "all removed":
        older.clear()
    code, said = run(SLOW, out, *EVERY, "--keep", "99")
    went_on_at = json.loads((out / "results.json").read_text())["resumed_from"] if code == 0 else -1
    now = checkpoints_of(out)
    kept = all(now.get(step) == content for step, content in older.items())
    same = code == 0 and (out / "weights.safetensors").read_bytes() == expected
    trial = Trial(fault, code, max(older, default=0), went_on_at, kept, same, said)
    named = "half-written" in fault or "removed" in fault or any("is damaged and passed over" in text for text in said)
    trial.right = same and kept and named and went_on_at == trial.intact
    shutil.rmtree(out)
    return trial


def foreign(killed: Path, folder: Path) -> Trial:
    """Puts the checkpoints of another training into the folder: refused, with what differs, and nothing is touched."""
    other, out = folder / "other", folder / "copy"
    interrupted(other, *EVERY, "--set", "step_s=0.021")
    shutil.copytree(killed, out)
    shutil.rmtree(out / "checkpoints")
    shutil.copytree(other / "checkpoints", out / "checkpoints")
    before = checkpoints_of(out)
    code, said = run(SLOW, out, *EVERY)
    trial = Trial("of another job", code, 0, -1, checkpoints_of(out) == before, False, said)
    trial.right = code == 2 and trial.old_intact and any("step_s=0.021 there" in text for text in said)
    shutil.rmtree(out)
    return trial


def fill(disk: Path, but: int) -> Path:
    """Fills a disk, all but so many bytes."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, filler.stat().st_size - but)
    return filler


def while_training(fault: str, folder: Path, expected: bytes) -> Trial | None:
    """Fills the disk of a training, or removes its folders, in its middle. None where no disk can be mounted."""
    disk, gates = folder / "disk", folder / "gates"
    disk.mkdir()
    gates.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        return _while_training(fault, disk, gates, expected) if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        disk.rmdir()
        shutil.rmtree(gates)


def _while_training(fault: str, disk: Path, gates: Path, expected: bytes) -> Trial:
    out, log = disk / "out", gates / "said.txt"
    every = ("--set", f"gates={gates}", "--set", "width=2000", "--checkpoint-every", "1steps", "--keep", "2")
    removed, filler = fault.endswith("removed"), None
    with open(log, "wb") as said:
        process = subprocess.Popen(line(GATED, out, *every), stdout=said, stderr=said)
    try:
        wait((out / "checkpoints" / "step-4").exists, process)  # and the job waits in its fifth step
        before = checkpoints_of(out)
        if removed:
            shutil.rmtree(out / "checkpoints" if "checkpoints" in fault else out)
        else:
            filler = fill(disk, 40_000 if "middle" in fault else 0)
        (gates / "filled").touch()
        wait((gates / "last").exists, process)
        awaited = (out / "checkpoints" / "step-7").exists
        wait(awaited if removed else lambda: b"no checkpoint of step 7" in log.read_bytes(), process)
        after = checkpoints_of(out)
        if filler:
            filler.unlink()
        (gates / "end").touch()
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    said_of_it = sentences(log.read_text())
    same = code == 0 and (out / "weights.safetensors").read_bytes() == expected
    trial = Trial(fault, code, max(before), max(after, default=0), removed or before == after, same, said_of_it)
    named = any(f"cannot write to {out}/checkpoints (No space left" in text for text in said_of_it)
    trial.right = same and trial.old_intact and (removed or named)
    return trial


def told(fault: str, trial: Callable[[], Trial | None]) -> Trial | None:
    """Runs a trial. One whose training does not go on is kept as wrong, and the others are tried all the same."""
    try:
        return trial()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Trial(fault, -1, 0, -1, False, False, [str(error)])


def trials(only: str, seed: int, here: Path) -> list[Trial]:
    """Tries the faults whose names hold `only`, and prints each."""
    found: list[Trial] = []

    def keep(trial: Trial | None, fault: str) -> None:
        if trial is None:
            print(f"skipped, since no disk can be mounted here: {fault}", flush=True)
            return
        trial.said = [text.replace(str(here), "…").replace(str(ROOT), "…") for text in trial.said]
        found.append(trial)
        print(trial, flush=True)

    chosen = {fault: damage for fault, damage in damages(random.Random(seed)).items() if only in fault}
    is_foreign, disks = only in "of another job", [fault for fault in DISKS if only in fault]
    if chosen or is_foreign:
        interrupted(here / "killed", *EVERY)
    if chosen:
        assert run(SLOW, here / "whole", *EVERY)[0] == 0
        whole = (here / "whole" / "weights.safetensors").read_bytes()
        for fault, damage in chosen.items():
            keep(told(fault, partial(between, fault, damage, here / "killed", here, whole)), fault)
    if is_foreign:
        keep(foreign(here / "killed", here), "of another job")
    if disks:
        assert run(GATED, here / "wide", "--set", "width=2000")[0] == 0
        wide = (here / "wide" / "weights.safetensors").read_bytes()
        for fault in disks:
            keep(told(fault, partial(while_training, fault, here, wide)), fault)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the faults whose names hold these words")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep trials.json in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-faults-") as folder:
        found = trials(options.only, options.seed, Path(folder))
    if not found:
        parser.error(f"--only {options.only}: no fault that can be tried here has these words in its name")
    right = sum(trial.right for trial in found)
    said = f"{right} of {len(found)} faults ended as they should"
    print(said)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"torch": version("torch"), "seed": options.seed, "said": said, "trials": list(map(asdict, found))}
        (options.out / "trials.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if right == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
