"""What `samestep monitor` adds to a step, inside the rank: processor time of one batch and one optimizer step.

    python benchmarks/monitored_step.py [--pairs 10] [--out FOLDER]

Two processes take turns, one of them monitored: each reads 4,000 batches of one row and takes an empty step after each,
twelve times, and tells the least processor time that this took. Other work on the machine changes that little.
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
from pathlib import Path

BATCHES, TIMES = 4000, 12


def least_us(monitored: bool) -> float:
    """Returns the microseconds of a batch and a step on a processor. To be called once in a process."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if monitored:
        from samestep.recorder.monitored_rank import attach

        attach(Path(tempfile.mkdtemp()))
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(BATCHES, 1)), batch_size=1)
    took = []
    for _ in range(TIMES):
        began = time.thread_time()
        for _ in loader:
            optimizer.step()
        took.append(time.thread_time() - began)
    return 1e6 * min(took) / BATCHES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=["plain", "monitored"])
    options = parser.parse_args()
    if options.measure:
        print(least_us(options.measure == "monitored"))
        return
    found: dict[str, list[float]] = {"plain": [], "monitored": []}
    for pair in range(options.pairs):
        for name in sorted(found, reverse=bool(pair % 2)):
            command = [sys.executable, __file__, "--measure", name]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[name].append(float(done.stdout))
    added = [one - other for one, other in zip(found["monitored"], found["plain"])]
    print(f"plain {statistics.median(found['plain']):.1f} us, monitored {statistics.median(found['monitored']):.1f} us")
    print(f"added: {statistics.median(added):.1f} us, {min(added):.1f} to {max(added):.1f} in {len(added)} pairs")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "step.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
