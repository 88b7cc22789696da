"""Launches healthy trainings, proofs, collectives and scripts on a busy machine: each must end well.

    python benchmarks/endings.py [--launches 200] [--at-once 3] [--ranks 2] [--out FOLDER]
    python benchmarks/endings.py --groups 1000 [--ranks 2] [--out FOLDER]

A launch ends well when its command exits with 0: no rank may leave while another still reads from it. Meanwhile a
process turns idle on each core, and --at-once launches run side by side, so that ranks end far apart. Every launcher
that is installed has its turn; forked ranks, which start fastest, every other one.

--groups instead opens and closes the ranks' process group so often, in processes that stay: after two collectives, the
second of which is another in each, and with a pause on one rank.

--out keeps a line of trials.jsonl for each, and table.txt. Launches that are kept there count, too, so that a record
can be made in pieces. Exit code 1 where one does not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from shutil import which

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from budget import budget
from fork_servers import fork_servers

TESTS = Path(__file__).parents[1] / "tests"
QUICK = f"{TESTS}/launch/jobs.py:quick"
SMALL = ("--op", "all_reduce,all_gather_object,send_recv,monitored_barrier", "--dtype", "float32", "--sizes", "1KiB")
FORKED = (
    ("run", "digits", "--set", "epochs=1", "--launcher", "fork"),
    ("collectives", *SMALL, "--seconds", "0.01", "--launcher", "fork"),
    ("check", f"{TESTS}/recorder/scripts/ddp.py"),
    ("run", QUICK, "--engine", "fsdp", "--launcher", "fork"),
    ("verify", QUICK, "--engine", "ddp", "--launcher", "fork"),
)
OTHERS = (
    ("run", QUICK, "--launcher", "torchrun"),
    ("collectives", *SMALL, "--seconds", "0.01", "--launcher", "mpirun"),
    ("run", QUICK, "--launcher", "spawn"),
    ("run", QUICK, "--launcher", "mpirun"),
    ("run", QUICK, "--engine", "horovod", "--launcher", "horovodrun"),
)


def commands(ranks: int) -> list[tuple[str, ...]]:
    """Returns one command after another, a forked one in every second place."""
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # horovodrun lies there
    here = [command for command in OTHERS if which(command[-1]) or command[-1] == "spawn"]
    count = len(FORKED) * len(here)
    both = [pair for n in range(count) for pair in (FORKED[n % len(FORKED)], here[n % len(here)])]
    return [(command, "--nproc", str(ranks), *more) for command, *more in both]


@contextmanager
def busy() -> Iterator[None]:
    """While it runs, a process turns idle on each core."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def launched(number: int, line: tuple[str, ...], folder: Path) -> dict[str, object]:
    """Runs one command to its end. Returns its line of trials.jsonl."""
    began = time.monotonic()
    name, *rest = line
    # Before the rest: what stands after a script is the script's own.
    command = [sys.executable, "-m", "samestep", name, "--out", str(folder / str(number)), *rest]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=budget(300))
        code, said = done.returncode, done.stderr.strip().splitlines()[-3:]
    except subprocess.TimeoutExpired:
        code, said = None, ["it did not end"]
    shown = " ".join(line).replace(f"{TESTS}/", "tests/")
    trial = {"number": number, "command": shown, "code": code, "seconds": round(time.monotonic() - began, 1)}
    return trial | {"load": round(os.getloadavg()[0], 1), "said": [] if code == 0 else said}


def closes_groups(rank: int, ranks: int, groups: int, folder: str) -> None:
    """Opens and closes a process group many times, as one rank. Writes the number of groups, and the errors."""
    import torch
    import torch.distributed as dist

    from samestep.rank.process_group import process_group
    from samestep.world import World

    tensor, errors = torch.ones(1000), []
    calls = (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        dist.barrier,
        lambda: dist.all_gather_object([None] * ranks, {"rank": list(range(100))}),
        dist.monitored_barrier,
        lambda: dist.reduce(tensor, 0),
    )
    for number in range(groups):
        os.environ["SAMESTEP_INIT_METHOD"] = f"file://{folder}/{number}"
        try:
            with process_group(World(rank, ranks, rank, ranks)):
                for call in (dist.barrier, calls[number % len(calls)]):
                    call()
                if number % ranks == rank:
                    time.sleep(random.Random(number).uniform(0, 0.05))
        except Exception as error:
            errors.append(f"{number}: {type(error).__name__}: {error}")
            break  # the others wait for this rank
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"rank": rank, "groups": number + 1, "errors": errors}))
    os._exit(0)


def closed_groups(ranks: int, groups: int) -> dict[str, object]:
    """Opens and closes process groups on some ranks at once. Returns its line of trials.jsonl."""
    from torch.multiprocessing.spawn import start_processes

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, busy():
        processes = start_processes(
            closes_groups, (ranks, groups, folder), nprocs=ranks, start_method="fork", join=False
        ).processes
        for process in processes:
            process.join(budget(600))
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    errors = [error for rank in said for error in rank["errors"]]
    well = len(said) == ranks and all(rank["groups"] == groups for rank in said) and not errors
    trial: dict[str, object] = {"command": f"{groups} process groups on {ranks} ranks", "code": int(not well)}
    return trial | {"seconds": round(time.monotonic() - began, 1), "load": round(os.getloadavg()[0], 1), "said": errors}


def table(trials: list[dict[str, object]]) -> str:
    """Returns the table: how many launches of each command there were, and how many ended well."""
    total, well = Counter(t["command"] for t in trials), Counter(t["command"] for t in trials if t["code"] == 0)
    lines = [f"{well[command]:4} of {total[command]:4}   {command}" for command in sorted(total, key=str)]
    return "\n".join([*lines, f"{sum(well.values()):4} of {len(trials):4}   ended well"])


def launches(options: argparse.Namespace, begun: int) -> Iterator[dict[str, object]]:
    """Runs the launches that are lacking, and yields a line of trials.jsonl for each."""
    lines = commands(options.ranks)
    with tempfile.TemporaryDirectory() as folder, fork_servers(), busy(), ThreadPoolExecutor(options.at_once) as pool:
        numbers = range(begun, options.launches)
        yield from pool.map(lambda n: launched(n, lines[n % len(lines)], Path(folder)), numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = options.out / "trials.jsonl" if options.out else None
    trials = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    budget()  # measures an import before the machine is busy
    for trial in [closed_groups(options.ranks, options.groups)] if options.groups else launches(options, len(trials)):
        trials.append(trial)
        print(json.dumps(trial), flush=True)
        if kept:
            with open(kept, "a") as file:
                file.write(f"{json.dumps(trial)}\n")
    print(table(trials))
    if options.out:
        (options.out / "table.txt").write_text(f"{table(trials)}\n")
    return any(trial["code"] != 0 for trial in trials)


if __name__ == "__main__":
    sys.exit(main())
