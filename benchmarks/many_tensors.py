"""What `verify` costs a tensor of the model, for models of few and of many tensors.

    python benchmarks/many_tensors.py [--tensors 100,1000,8000] [--engine ddp] [--ema 0.9] [--nproc 2] [--out FOLDER]

Verifies a job whose model has so many small tensors, and prints the wall-clock and CPU seconds of each, and the CPU
milliseconds that each tensor adds to the smallest model. Those stay as they are where the cost is linear; where a
file is opened, or a list searched, once for each tensor, they grow with the number of tensors. Exit code 1 where the
last is more than twice the first, or a verdict is not *same step*.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TENSORS = "100,500,1000,2000,4000,8000"
MOST = 2.0  # times the first cost of a tensor that the last may be
JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


class Many(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 2)
        self.many = nn.ParameterList([nn.Parameter(torch.randn(3) * 0.01) for _ in range(tensors)])

    def forward(self, x):
        return self.linear(x) + torch.stack(list(self.many)).sum() * 0.001


def job(tensors: int = 100, ema: float = 0.0) -> Job:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: Many(tensors),
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.01}),
        train=TensorDataset(x, (x.sum(1) > 0).long()),
        global_batch=8,
        ema=ema or None,
    )
"""


def measure(tensors: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Verifies the job once. Returns its seconds; exits where the verdict is not 'same step'."""
    settings = ["--set", f"tensors={tensors}", "--set", f"ema={options.ema}"]
    command = [sys.executable, "-m", "samestep", "verify", "many.py", "--engine", options.engine, *settings]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(
        [*command, "--nproc", str(options.nproc)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode or b"same step" not in ended.stdout:
        sys.exit(ended.stdout.decode())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"tensors": tensors, "wall_s": seconds, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default=TENSORS)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--ema", type=float, default=0.0)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "many.py").write_text(JOB)
        for tensors in map(int, options.tensors.split(",")):
            rows.append(measure(tensors, options, folder))
            if len(rows) > 1:
                added = rows[-1]["cpu_s"] - rows[0]["cpu_s"]
                rows[-1]["ms_a_tensor"] = 1000 * added / (tensors - rows[0]["tensors"])
            print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    costs = [row["ms_a_tensor"] for row in rows[1:]]
    ratio = costs[-1] / costs[0]
    print(f"{options.engine}: a tensor of the largest model costs {ratio:.2f} of one of the second smallest")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"engine": options.engine, "ema": options.ema, "ranks": options.nproc, "cores": os.cpu_count()}
        file = options.out / f"{options.engine}{'_ema' if options.ema else ''}.json"
        file.write_text(json.dumps({**about, "rows": rows, "ratio": ratio}, indent=1) + "\n")
    sys.exit(ratio > MOST)


if __name__ == "__main__":
    main()
