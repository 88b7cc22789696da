"""What samestep's commands cost to start, in units of what importing torch takes on the same machine in the same run.

    python benchmarks/starts.py [--turns 5] [--demo] [--engines NAMES] [--out FOLDER]

Each turn times `python -c "import torch"`, `samestep --help` and `samestep verify digits --engine ddp --nproc 2`, one
after the other; the ratios are of one turn, because the machine drifts. `--demo` times what `make demo` runs, once,
between imports, which say how busy the machine was; `--engines`: with these engines alone. `--out` keeps starts.json
there, and of the demo results.json, report.html and terminal.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
IMPORT = [sys.executable, "-c", "import torch"]
SAMESTEP = [sys.executable, "-m", "samestep"]
# At most, on two idle cores: seconds, and imports of torch.
GOALS = {"help_s": 0.3, "verify_imports": 4, "demo_imports": 30}


@dataclass
class Turn:
    """Seconds of each command, whole processes by the wall clock."""

    import_s: float
    help_s: float
    verify_s: float

    @property
    def verify_imports(self) -> float:
        return self.verify_s / self.import_s


def seconds(command: list[str], folder: str) -> float:
    """Runs a command to its end, which must be a good one. Returns its seconds."""
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def turn(folder: str) -> Turn:
    verify = [*SAMESTEP, "verify", "digits", "--engine", "ddp", "--nproc", "2"]
    return Turn(seconds(IMPORT, folder), seconds([*SAMESTEP, "--help"], folder), seconds(verify, folder))


def demo_command() -> list[str]:
    """Returns the arguments of samestep in `make demo`, as the Makefile has them."""
    (line,) = re.findall(r"^DEMO = (.*)$", MAKEFILE.read_text(), re.M)
    return str(line).split()


def demo(engines: str, folder: str, out: Path | None) -> dict[str, float | str]:
    """Times the command of `make demo` between imports of torch. Keeps what it printed and its results in `out`."""
    chosen = ["--engines", engines] if engines else []
    command = [*SAMESTEP, *demo_command(), *chosen, "--out", "runs/demo"]
    environment = os.environ | {"COLUMNS": "100"}
    imports = [seconds(IMPORT, folder) for _ in range(2)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    took = time.perf_counter() - began
    imports += [seconds(IMPORT, folder) for _ in range(2)]
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "terminal.txt").write_text(done.stdout)
        for name in ("results.json", "report.html"):
            (out / name).write_bytes((Path(folder) / "runs" / "demo" / name).read_bytes())
    import_s = statistics.median(imports)
    line = " ".join(["samestep", *demo_command(), *chosen])
    return {"command": line, "import_s": import_s, "demo_s": took, "imports": took / import_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--demo", action="store_true", help="time what `make demo` runs, too")
    parser.add_argument("--engines", default="", help="the demo's engines; by default all that are installed")
    parser.add_argument("--out", type=Path, help="keep starts.json in this folder")
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        seconds(IMPORT, folder)  # so that the first turn reads nothing from the disk
        turns = [turn(folder) for _ in range(options.turns)]
        timed = demo(options.engines, folder, options.out) if options.demo else None
    verify = sorted(each.verify_imports for each in turns)
    summary = {
        "import_s": statistics.median(each.import_s for each in turns),
        "help_s": statistics.median(each.help_s for each in turns),
        "verify_imports": statistics.median(verify),
        "verify_imports_range": [verify[0], verify[-1]],
        "demo": timed,
    }
    for name, value in summary.items():
        print(f"{name}: {value}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"cores": os.cpu_count(), "load_average_before": load, "python": sys.version.split()[0]}
        raw = {"about": about, "goals": GOALS, "summary": summary, "turns": [asdict(each) for each in turns]}
        (options.out / "starts.json").write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
