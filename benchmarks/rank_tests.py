"""What a test on two ranks costs with samestep.testing, from pytest's process.

    python benchmarks/rank_tests.py [--tests 30] [--out FILE]

Runs pytest on a file of equal tests, each an all_reduce on two ranks. Prints the seconds of the first test, which
starts the process that imports torch and the ranks, the median and the slowest of the others, the median of tests after
one that failed, whose processes are new, and, in the same run, the seconds of importing torch and of one
`torch.multiprocessing.spawn` of two processes that do the same.
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

SOURCE = """
import time

import pytest
import torch
import torch.distributed as dist

from samestep.testing import ranks


@ranks(2)
@pytest.mark.parametrize("number", range({tests}))
def test_sum(number):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert total.item() == 1


@ranks(2)
@pytest.mark.parametrize("number", range(2 * {replaced}))
def test_every_second_fails(number):
    assert number % 2
"""
TIMES = """
import os
import time

BEGAN = {}


def pytest_runtest_logstart(nodeid):
    BEGAN[nodeid] = time.perf_counter()


def pytest_runtest_logfinish(nodeid):
    if "RANK" not in os.environ:  # pytest's own process, which reports after all ranks
        with open("times", "a") as file:
            print(time.perf_counter() - BEGAN[nodeid], file=file)
"""
REPLACED = 5  # tests whose ranks' processes are new
SPAWNED = """
import sys
import tempfile

import torch
import torch.distributed as dist


def work(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == 1
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)
"""


def seconds(command: list[str]) -> float:
    """Runs a command to its end, which must be a good one. Returns its seconds."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def tests(folder: Path, number: int) -> list[float]:
    """Runs pytest on `number` equal tests, then on others of which every second fails. Returns the seconds of each."""
    (folder / "test_ranks.py").write_text(SOURCE.format(tests=number, replaced=REPLACED))
    (folder / "conftest.py").write_text(TIMES)
    loaded = ["-p", "samestep.testing", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *loaded, "test_ranks.py"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert f"{REPLACED} failed, {number + REPLACED} passed" in done.stdout, done.stdout
    return [float(line) for line in (folder / "times").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spawned.py").write_text(SPAWNED)
        import_s = seconds([sys.executable, "-c", "import torch"])
        spawn_s = seconds([sys.executable, str(folder / "spawned.py"), str(folder / "store")])
        first, *others = tests(folder, options.tests)
        others, replaced = others[: options.tests - 1], others[options.tests + 1 :: 2]
    figures = {
        "import_torch_s": import_s,
        "spawn_two_s": spawn_s,
        "first_s": first,
        "others_median_s": statistics.median(others),
        "others_slowest_s": max(others),
        "after_a_failure_s": statistics.median(replaced),
    }
    for what, value in figures.items():
        print(f"{what}: {value:.3f}")
    if options.out:
        about = {"cores": os.cpu_count(), "load_average_before": load, "tests": options.tests}
        options.out.write_text(json.dumps({"about": about, **figures, "others_s": others}, indent=1))


if __name__ == "__main__":
    main()
