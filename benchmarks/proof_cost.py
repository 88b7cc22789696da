"""What a proof costs: the reference of an MLP of 10 million parameters, or `verify` of a job from its start to its end.

    python benchmarks/proof_cost.py [--out FOLDER] [--ranks 2]
    python benchmarks/proof_cost.py --job imagefolder --set data=FOLDER [--out FOLDER] [--ranks 2]

Without --job: verifies the job `mlp` below with the engine ddp, then plays its reference and trains it as it is again,
each alone in a process with one thread whose CPU time and peak memory the kernel counts. What a training of one step
takes, to start, is left out of the reference's steps.

With --job: runs `samestep verify` once under ddp, and samples the memory and the files of all of its processes. The
machine's load, and what an import of torch takes in the same run, stand beside the times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.records.files import read, write
from samestep.records.plan import MeasureTask, Plan, ReferencePlan

OWN_STEPS = 20
WIDTH = 2236  # 784 → 2236 → 2236 → 1448 → 10: ten million parameters


def mlp(rows: int = 6400, global_batch: int = 256) -> Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 784, generator=generator)
    targets = torch.randint(0, 10, (rows,), generator=generator)

    def model() -> nn.Module:
        torch.manual_seed(0)
        widths = (784, WIDTH, WIDTH, 1448, 10)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=TensorDataset(inputs, targets),
        evaluation=TensorDataset(inputs[:1000], targets[:1000]),
        global_batch=global_batch,
    )


job = mlp


@dataclass(frozen=True)
class Used:
    """cpu_s: user and system. peak_bytes: of the resident set."""

    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Cost:
    """verify_s, verify_cpu_s: of all processes of `verify`; quick_s, quick_cpu_s: with --quick. steps: CPU seconds of
    the reference over those of one step of the job as it is. memory, disk, left: bytes a parameter; memory beyond that
    of the training as it is, disk of the reference's files, left of all that `verify` leaves."""

    parameters: int
    verify_s: float
    verify_cpu_s: float
    quick_s: float
    quick_cpu_s: float
    reference: Used
    own: Used
    starting: Used
    steps: float
    memory: float
    disk: float
    left: float


def used(arguments: list[str]) -> Used:
    """Runs a Python process to its end."""
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1", **ONE})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments} ended with status {status}")
    return Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def worker(folder: Path, plan: Plan | ReferencePlan, *flags: str) -> Used:
    """Runs one worker alone, with its files in `folder`."""
    folder.mkdir()
    write(folder / "plan.json", replace(plan, out=str(folder), threads=1))
    return used(["-m", "samestep.worker", *flags, str(folder / "plan.json")])


def measure(ranks: int, folder: Path) -> Cost:
    """Measures the cost of the proof on `ranks` ranks."""
    here = str(Path(__file__).resolve())
    command = [sys.executable, "-m", "samestep", "verify", here, "--engine", "ddp", "--nproc", str(ranks), "--out"]
    verify_s, verify_cpu_s = timed([*command, str(folder / "v")])
    quick_s, quick_cpu_s = timed([*command, str(folder / "quick"), "--quick"])
    (path,) = folder.glob("v/**/reference/plan.json")
    reference = worker(folder / "reference", read(ReferencePlan, path), "--reference")
    own = [
        worker(folder / f"own{steps}", Plan("", time.time(), here, {}, "single", trainings=(MeasureTask(steps),)))
        for steps in (1, 1 + OWN_STEPS)
    ]
    step_s = (own[1].cpu_s - own[0].cpu_s) / OWN_STEPS
    parameters = sum(p.numel() for p in mlp(8, 4).model().parameters())
    return Cost(
        parameters=parameters,
        verify_s=verify_s,
        verify_cpu_s=verify_cpu_s,
        quick_s=quick_s,
        quick_cpu_s=quick_cpu_s,
        reference=reference,
        own=own[1],
        starting=own[0],
        steps=(reference.cpu_s - own[0].cpu_s) / step_s,
        memory=(reference.peak_bytes - own[1].peak_bytes) / parameters,
        disk=_bytes(folder / "reference") / parameters,
        left=_bytes(folder / "v") / parameters,
    )


@dataclass(frozen=True)
class Whole:
    """`verify` from its start to its end. settings: without `data`. memory: the largest sum over its processes at once,
    of which each counts its share of common pages. disk: the largest, and what is left. import_s, import_cpu_s: of
    torch. load: the processes that wanted a core, a mean over a minute before and after."""

    job: str
    settings: dict[str, str]
    verdict: str
    seconds: float
    cpu_s: float
    memory: int
    disk: int
    disk_left: int
    import_s: float
    import_cpu_s: float
    load: tuple[float, float]

    def lines(self) -> list[str]:
        job = " ".join([self.job, *(f"{name}={value}" for name, value in self.settings.items())])
        return [
            f"verify {job}: {self.verdict}",
            f"time                     {self.seconds:.0f} s at a load of {self.load[0]:.1f} to {self.load[1]:.1f}",
            f"CPU time                 {self.cpu_s:.0f} s, {self.cpu_s / self.import_cpu_s:.0f} imports of torch",
            f"memory of all processes  {self.memory / 2**30:.2f} GiB",
            f"files                    {self.disk / 2**20:.0f} MiB at most, {self.disk_left / 2**20:.0f} MiB left",
        ]


def whole(job: str, settings: dict[str, str], ranks: int, folder: Path) -> tuple[Whole, str]:
    """Measures `verify` of a job, and returns what it printed without the report's path, too."""
    load, (import_s, import_cpu_s) = os.getloadavg()[0], timed([sys.executable, "-c", "import torch"])
    named = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = ["-m", "samestep", "verify", job, *named, "--engine", "ddp", "--nproc", str(ranks)]
    sampled = Sampled(folder / "v")
    with open(folder / "screen.txt", "w+") as screen:
        seconds, cpu_s = timed([sys.executable, *words, "--out", str(folder / "v")], screen, sampled)
        screen.seek(0)
        printed = "".join(line for line in screen if not line.startswith("report:"))
    results = json.loads((folder / "v" / "results.json").read_text())
    return Whole(
        job=Path(job).name,
        settings={name: value for name, value in settings.items() if name != "data"},
        verdict=results["engines"][0]["verdict"],
        seconds=seconds,
        cpu_s=cpu_s,
        memory=sampled.memory,
        disk=sampled.disk,
        disk_left=_bytes(folder / "v"),
        import_s=import_s,
        import_cpu_s=import_cpu_s,
        load=(load, os.getloadavg()[0]),
    ), printed


class Sampled:
    """The largest memory and files of a process and its descendants, looked at once a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.memory, self.disk = folder, 0, 0

    def watch(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                root = psutil.Process(process.pid)
                self.memory = max(self.memory, sum(map(_share, [root, *root.children(recursive=True)])))
            self.disk = max(self.disk, _bytes(self.folder))
            time.sleep(1)


def _share(process: psutil.Process) -> int:
    """The bytes of a process, of common pages its share; 0 once it has ended."""
    try:
        found = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(found, "pss", found.rss))


def timed(command: list[str], screen: IO[str] | None = None, sampled: Sampled | None = None) -> tuple[float, float]:
    """Runs a command. Returns its seconds, and the CPU seconds of all of its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(command, stdout=screen, stderr=subprocess.STDOUT if screen else None, text=True)
    if sampled:
        threading.Thread(target=sampled.watch, args=(process,), daemon=True).start()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _bytes(folder: Path) -> int:
    """The bytes of all files, but of those that go while they are counted."""
    total = 0
    for home, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(home, name)).st_size
    return total


def keep(out: Path | None, lines: list[str], ranks: int, facts: dict[str, object], printed: str | None = None) -> None:
    """Prints the figures, and keeps them in a folder."""
    print("\n".join(lines))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        about = {"ranks": ranks, "torch": torch.__version__, "cores": os.cpu_count(), **facts}
        (out / "raw.json").write_text(json.dumps(about, indent=1) + "\n")
        (out / "table.txt").write_text("\n".join(lines) + "\n")
        if printed:
            (out / "screen.txt").write_text(printed)


def main() -> None:
    """Measures, prints and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--job")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.job:
            settings = dict(setting.split("=", 1) for setting in asked.set)
            found, printed = whole(asked.job, settings, asked.ranks, folder)
            keep(asked.out, found.lines(), asked.ranks, asdict(found), printed)
            return
        cost = measure(asked.ranks, folder)
    lines = [
        f"parameters               {cost.parameters:,}",
        f"verify, in all           {cost.verify_s:.1f} s, {cost.verify_cpu_s:.1f} CPU s",
        f"verify --quick, in all   {cost.quick_s:.1f} s, {cost.quick_cpu_s:.1f} CPU s",
        f"reference                {cost.reference.cpu_s:.1f} CPU s, {cost.reference.peak_bytes / 2**20:.0f} MiB",
        f"own training             {cost.own.cpu_s:.1f} CPU s, {cost.own.peak_bytes / 2**20:.0f} MiB",
        f"reference, own steps     {cost.steps:.0f}",
        f"memory a parameter       {cost.memory:.1f} B beyond the training's own",
        f"disk a parameter         {cost.disk:.1f} B for the reference, {cost.left:.1f} B left by verify",
    ]
    keep(asked.out, lines, asked.ranks, asdict(cost))


if __name__ == "__main__":
    main()
