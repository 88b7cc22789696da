"""What watching a command costs: the CPU time of `samestep monitor` while the command runs, as a share of one core.

    python benchmarks/monitor.py [--seconds 60] [--out FOLDER]

Each command but the last one only sleeps, so that the process of the monitor alone takes time; what it takes to start,
and to draw the plot at the end, is left out. The share is of CPU time, which other work on the machine does not change
much.

    one process      `sleep`
    30, 300          a shell with so many children
    short-lived      a shell that starts 20 processes a second
    a terminal       one process, with the live line in a pseudo-terminal
    every 0.1 s      one process, with --interval 0.1: the interval grows to keep to the limit
    a training       two ranks, tests/launch/monitored.py under torchrun, after the first looks at them
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

SETTLE_S = 3.0  # after the command has begun
SETTLE_TRAINING_S = 45.0
LIMIT = 0.006
TRAINING = Path(__file__).parents[1] / "tests" / "launch" / "monitored.py"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
CASES = {
    "one process": ("sleep {s}", []),
    "30 processes": ("for i in $(seq 30); do sleep {s} & done; wait", []),
    "300 processes": ("for i in $(seq 300); do sleep {s} & done; wait", []),
    "20 short-lived processes a second": ("while true; do /bin/true; sleep 0.05; done", []),
    "one process, in a terminal": ("sleep {s}", []),
    "one process, --interval 0.1": ("sleep {s}", ["--interval", "0.1"]),
    "a training": (f"exec {TORCHRUN} {TRAINING} none 1000000 0.02", []),
}


def measure(name: str, seconds: float, folder: Path) -> dict[str, float]:
    """Returns the monitor's share of a core over `seconds`, its samples a second and the processes of the machine."""
    shell, options = CASES[name]
    command = ["sh", "-c", shell.format(s=int(seconds + 60))]
    main, other = os.openpty() if "terminal" in name else (None, subprocess.DEVNULL)
    process = psutil.Popen(
        [sys.executable, "-m", "samestep", "monitor", *options, "--out", str(folder), "--", *command],
        stdout=other,
        stderr=other,
        env=os.environ | {"TERM": "xterm"},
    )
    if main is not None:
        threading.Thread(target=_drain, args=(main,), daemon=True).start()
    file = folder / "usage.csv"
    while not file.exists() or file.read_text().count("\n") < 2:
        time.sleep(0.05)
    time.sleep(SETTLE_TRAINING_S if name == "a training" else SETTLE_S)
    before, began, lines = process.cpu_times(), time.monotonic(), file.read_text().count("\n")
    time.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    samples, processes = file.read_text().count("\n") - lines, len(psutil.pids())
    process.terminate()
    process.wait()
    cpu_s = after.user + after.system - before.user - before.system
    return {"share": cpu_s / took, "samples_per_second": samples / took, "processes_of_the_machine": processes}


def _drain(descriptor: int) -> None:
    while True:
        try:
            os.read(descriptor, 65536)
        except OSError:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(name, options.seconds, Path(folder) / "out")
    # What is asked for more often may cost more.
    worst = max(each["share"] for name, each in found.items() if "--interval" not in name)
    text = "".join(
        f"{name:36} {100 * each['share']:5.2f} % of a core  {each['samples_per_second']:5.2f} samples a second  "
        f"{each['processes_of_the_machine']:4.0f} processes on the machine\n"
        for name, each in found.items()
    )
    text += f"the limit, {100 * LIMIT:.1f} % of a core, is {'kept' if worst <= LIMIT else 'broken'}\n"
    print(text, end="")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "monitor.txt").write_text(text)
        (options.out / "monitor.json").write_text(json.dumps({"seconds": options.seconds, "cases": found}, indent=1))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
