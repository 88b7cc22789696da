"""What the watchdog costs a training: the heartbeat's writes, torch's flight recorder, and the parent's looks.

    python benchmarks/heartbeat.py [--out FOLDER]

A step's time varies by more than the watchdog costs, so that no two trainings could show it. Each part is timed by
itself instead, and divided by the time of a step: the fastest step of a small network, the digits job with a width of
16, under ddp on two ranks.

    writes      a step without gradient accumulation has four; a row that the dataset reads has one more
    recorder    the fastest of many blocks of all_reduces on one rank, with the recorder and without; the launches
                alternate, and the medians over the launches are compared. How far launches differ is shown.
    looks       the parent's CPU time for one second of looking at two ranks' heartbeats
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
from collections.abc import Callable
from pathlib import Path

from samestep.launch import Machines
from samestep.launch.watchdog import POLL_S, Watchdog
from samestep.world import heartbeat
from samestep.world.heartbeat import BACKWARD, FORWARD, LOADING, Heartbeat

LAUNCHES, BLOCKS, BLOCK = 9, 60, 200
ALL_REDUCES = f"""
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
tensor = torch.ones(10)
best = 1.0
for _ in range({BLOCKS}):
    began = time.perf_counter()
    for _ in range({BLOCK}):
        dist.all_reduce(tensor)
    best = min(best, (time.perf_counter() - began) / {BLOCK})
print(best * 1e6, flush=True)
os._exit(0)
"""


def fastest_us(do: Callable[[], object], times: int = 20_000) -> float:
    """Returns the microseconds of one call, of the fastest of 20 blocks of calls."""
    blocks = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(times):
            do()
        blocks.append((time.perf_counter() - began) / times * 1e6)
    return min(blocks)


def writes_us(folder: Path) -> tuple[float, float]:
    """Returns the microseconds of a step's writes, and of a row's."""
    mine = Heartbeat()
    mine.open(heartbeat.file_of(folder, 0))

    def step() -> None:
        mine.begin(LOADING, 5)
        mine.begin(FORWARD, 5)
        mine.begin(BACKWARD, 5)
        mine.step(6)

    nothing = fastest_us(lambda: None)
    return fastest_us(step) - nothing, fastest_us(lambda: mine.row(7)) - nothing


def recorder_us(folder: Path) -> tuple[float, float, float]:
    """Returns the microseconds of an all_reduce without and with the recorder, and the spread between launches."""
    found: dict[str, list[float]] = {"0": [], "256": []}
    for number in range(LAUNCHES):
        for size, times in found.items():
            environment = os.environ | {"TORCH_FR_BUFFER_SIZE": size, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", ALL_REDUCES, str(folder / f"meet-{number}-{size}")]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            times.append(float(done.stdout))
    without, with_it = (statistics.median(times) for times in found.values())
    return without, with_it, statistics.stdev(found["0"])


def looks_s(folder: Path) -> float:
    """Returns the parent's CPU seconds for one second of watching two ranks."""
    for rank in range(2):
        (folder / f"pid-rank{rank}").write_text(f"{os.getpid()}@{os.uname().nodename}")
        Heartbeat().open(heartbeat.file_of(folder, rank))
    watchdog = Watchdog(folder, 2, Machines(), None)
    spent = []
    for _ in range(20):
        time.sleep(POLL_S)
        began = time.process_time()
        watchdog.check()
        spent.append(time.process_time() - began)
    return statistics.median(spent) / POLL_S


def step_us() -> float:
    """Returns the fastest step of a small digits job under ddp on two ranks, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "samestep",
            "run",
            "digits",
            "--set",
            "width=16",
            "--set",
            "global_batch=64",
            "--nproc",
            "2",
        ]
        subprocess.run([*command, "--out", f"{folder}/out"], check=True, capture_output=True)
        record = json.loads(Path(folder, "out", "rank0.json").read_text())
        return min(record["trainings"]["train"]["step_s"]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        of_step, of_row = writes_us(folder)
        without, with_it, spread = recorder_us(folder)
        looking, step = looks_s(folder), step_us()
    lines = [
        f"a step of digits with a width of 16, the fastest, ddp, 2 ranks, {os.cpu_count()} cores: {step:.0f} us",
        f"the heartbeat's writes: {of_step:.2f} us a step, {of_step / step:.4%} of it; {of_row:.3f} us for a row",
        f"the flight recorder: {with_it - without:+.2f} us for an all_reduce of {without:.1f} us; one launch differs "
        f"from the next by {spread:.2f} us (standard deviation)",
        f"the parent's looks: {looking:.4%} of one core",
    ]
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.txt").write_text("\n".join(lines) + "\n")
        raw = {"step_us": step, "writes_us": of_step, "row_us": of_row, "all_reduce_us": without}
        raw |= {"all_reduce_recorded_us": with_it, "all_reduce_spread_us": spread, "looks": looking}
        (options.out / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
