"""What the reference of a proof costs: its steps, memory and disk, for an MLP of 10 million parameters.

    python benchmarks/proof_cost.py [--out FOLDER] [--ranks 2]

Verifies the job `mlp` below with the engine ddp, then plays its reference and trains it as it is again, each alone in
a process with one thread whose CPU time and peak memory the kernel counts. What a training of one step takes, to start,
is left out of the reference's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.records.files import read, write
from samestep.records.plan import Measure, Plan, ReferencePlan

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
    """steps: CPU seconds of the reference over those of one step of the job as it is. memory, disk, left: bytes a
    parameter; memory beyond that of the training as it is, disk of the reference's files, left of all that `verify`
    leaves."""

    parameters: int
    verify_s: float
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
    here, began = str(Path(__file__).resolve()), time.monotonic()
    command = ["-m", "samestep", "verify", here, "--engine", "ddp", "--nproc", str(ranks), "--out", str(folder / "v")]
    subprocess.run([sys.executable, *command], check=True)
    verify_s = time.monotonic() - began
    (path,) = folder.glob("v/**/reference/plan.json")
    reference = worker(folder / "reference", read(ReferencePlan, path), "--reference")
    own = [
        worker(folder / f"own{steps}", Plan("", time.time(), here, {}, "single", trainings=(Measure(steps),)))
        for steps in (1, 1 + OWN_STEPS)
    ]
    step_s = (own[1].cpu_s - own[0].cpu_s) / OWN_STEPS
    parameters = sum(p.numel() for p in mlp(8, 4).model().parameters())
    return Cost(
        parameters=parameters,
        verify_s=verify_s,
        reference=reference,
        own=own[1],
        starting=own[0],
        steps=(reference.cpu_s - own[0].cpu_s) / step_s,
        memory=(reference.peak_bytes - own[1].peak_bytes) / parameters,
        disk=_bytes(folder / "reference") / parameters,
        left=_bytes(folder / "v") / parameters,
    )


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Measures, prints and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost = measure(asked.ranks, Path(folder))
    lines = [
        f"parameters               {cost.parameters:,}",
        f"verify, in all           {cost.verify_s:.1f} s",
        f"reference                {cost.reference.cpu_s:.1f} CPU s, {cost.reference.peak_bytes / 2**20:.0f} MiB",
        f"own training             {cost.own.cpu_s:.1f} CPU s, {cost.own.peak_bytes / 2**20:.0f} MiB",
        f"reference, own steps     {cost.steps:.0f}",
        f"memory a parameter       {cost.memory:.1f} B beyond the training's own",
        f"disk a parameter         {cost.disk:.1f} B for the reference, {cost.left:.1f} B left by verify",
    ]
    print("\n".join(lines))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        facts = {"ranks": asked.ranks, "torch": torch.__version__, "cores": os.cpu_count(), **asdict(cost)}
        (asked.out / "raw.json").write_text(json.dumps(facts, indent=1) + "\n")
        (asked.out / "table.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
