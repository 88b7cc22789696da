"""What `samestep monitor` adds to a step: inside the rank, and by the command beside it.

    python benchmarks/monitored_step.py [--pairs 10] [--beside 120] [--out FOLDER]

Two processes take turns, one of them monitored: each reads 4,000 batches of one row and takes an empty step after each,
twelve times, and tells the least processor time that this took. Other work on the machine changes that little.

--beside: for so many seconds of one training of two ranks, the command itself is stopped for two seconds, and goes on
for two, in turn: how much longer a step takes while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from monitored_faults import launch, print_ratio
from samestep.world import heartbeat

BATCHES, TIMES = 4000, 12
STEP_S = 0.004
WINDOW_S, SETTLE_S = 2.0, 60.0  # the first looks are made up for by then


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


def beside(seconds: float) -> list[tuple[float, float]]:
    """Returns the milliseconds of a step while the command runs, and while it is stopped, for each two windows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "samestep", "monitor", "--out", "out", "--", *launch("clock", 10**5, STEP_S)]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pulse = heartbeat.file_of(Path(folder) / "out" / "ranks", 0)

        def step_ms() -> float:
            began, first = time.monotonic(), heartbeat.read(pulse)
            time.sleep(WINDOW_S)
            ended, last = time.monotonic(), heartbeat.read(pulse)
            assert first is not None and last is not None
            return 1e3 * (ended - began) / (last.taken - first.taken)

        try:
            time.sleep(SETTLE_S)
            found = []
            while len(found) * 2 * WINDOW_S < seconds:
                found.append([0.0, 0.0])
                for stopped in random.sample([False, True], 2):
                    process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
                    found[-1][stopped] = step_ms()
            return [(runs, stopped) for runs, stopped in found]
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--beside", type=float, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=["plain", "monitored"])
    options = parser.parse_args()
    if options.measure:
        print(least_us(options.measure == "monitored"))
        return
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.beside:
        windows = beside(options.beside)
        ratios = [runs / stopped for runs, stopped in windows]
        print(f"a step of {statistics.median(stopped for _, stopped in windows):.2f} ms")
        print_ratio("  while the command runs", ratios)
        if options.out:
            (options.out / "beside.json").write_text(json.dumps(windows) + "\n")
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
        (options.out / "step.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
