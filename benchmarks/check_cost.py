"""What `samestep check SCRIPT` costs beside `torchrun SCRIPT`, on public scripts, by the wall clock.

    python benchmarks/check_cost.py --checkouts FOLDER [--rounds 2] [--steps 8] [--only WORDS] [--out FOLDER]

Both run the script of a case of tests/recorder/public_scripts on two ranks with the same stand-ins, the import of torch
included, and end after as many optimizer steps; check replays them as well. They are run in turn. A figure is the
median of a script's rounds; the ratio is that of the medians. FOLDER is that of tests/recorder/public.py.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from planting import plant_in_files
from recorder.public import STANDINS, taken
from recorder.public_scripts import CASES
from recorder.public_scripts.case import Case

SCRIPTS = (
    "ddp-tutorial multigpu_torchrun",
    "imagenet",
    "nanoGPT",
    "DINO",
    "MAE",
    "ConvNeXt",
    "build-nanogpt",
    "minimind train_pretrain",
    "DDP-practice ddp_main_torchrun",
    "WZMIAOMIAO train_multi_gpu_using_launch",
)
LIMIT_S = 300
WAYS = ("torchrun", "check")


def command(way: str, case: Case, folder: Path, steps: int, out: Path) -> list[str]:
    script = os.path.relpath(folder / case.script, folder / case.cwd)
    program = Path(sys.executable).with_name("torchrun")
    if way == "torchrun":
        return [str(program), "--standalone", "--nproc_per_node", "2", script, *case.arguments]
    words = [sys.executable, "-m", "samestep", *way.split(), "--nproc", "2", "--json", "--steps", str(steps)]
    return [*words, "--out", str(out), script, *case.arguments]


def seconds(way: str, case: Case, checkouts: Path, steps: int) -> float:
    """Runs a script once in a folder of its own; raises RuntimeError where it does not come to its last step."""
    with tempfile.TemporaryDirectory(prefix="samestep-cost-") as name:
        folder = Path(name, "script")
        folder.mkdir()
        taken(case, checkouts, folder)
        plant_in_files(folder, (*case.sizes, *case.edits), case.script)
        if case.prepare:
            case.prepare(folder)
        env = os.environ | dict(case.env) | {"STANDINS": " ".join(case.before), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STANDINS / "at_start"), os.environ.get("PYTHONPATH")]))
        if way == "torchrun":
            env["ENDED_AFTER"] = str(steps)
        words = command(way, case, folder, steps, Path(name, "out"))
        began = time.monotonic()
        done = subprocess.run(words, cwd=folder / case.cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        took = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"{case.name}, {way}: exit {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the repositories, each OWNER+NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--only", default="", help="scripts whose names match this expression")
    parser.add_argument("--out", type=Path, help="keep each time in this folder")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in SCRIPTS and re.search(options.only, case.name)]
    times: dict[str, dict[str, list[float]]] = {case.name: {way: [] for way in WAYS} for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            for way in WAYS:
                times[case.name][way].append(round(seconds(way, case, options.checkouts, options.steps), 2))
                print(case.name, way, times[case.name][way][-1], flush=True)
    lines = ["| script | torchrun | check | check / torchrun |", "|---" * 4 + "|"]
    ratios = []
    for name, by_way in times.items():
        medians = [statistics.median(by_way[way]) for way in WAYS]
        ratios.append(medians[1] / medians[0])
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f} s" for value in medians) + f" | {ratios[-1]:.2f} |")
    lines.append(f"\n{len(ratios)} scripts: median ratio {statistics.median(ratios):.2f}, largest {max(ratios):.2f}.")
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "times.json").write_text(json.dumps(times, indent=1) + "\n")
        (options.out / "table.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
