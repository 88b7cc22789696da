"""What one GPU can prove: every engine on it alone, and several ranks that share it as threads.

    python benchmarks/one_gpu.py --out results/one_gpu_DATE [--at-once 4] [--deadline 200] [--quick] [--only WORD …]

Proves `digits` under each engine that is installed, on one rank; and the small GPT below under the engines whose ranks
may be threads, at 2, 4 and 8 ranks. `--only ddp 4 --only offload` runs the rows whose names have all of one's words.
Writes rows.json after each row, so that a run that is cut off leaves a record: the command line, seconds, verdict,
largest difference and its bound, the peak of the GPU's memory that the row's processes held, and of a row that fails
the end of what it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.models.gpt import GPT
from samestep.records.files import replace_text
from samestep.world.nvidia import open_nvml

ALONE = ("single", "ddp", "fsdp", "zero", "amp", "dataparallel", "accelerate", "lightning", "fabric", "hf")
SHARED = ("ddp", "fsdp", "zero", "tensor", "context")
SIZES = (2, 4, 8)
TOLD = ("verdict", "bitwise", "max_difference", "bound", "reason", "notes", "first_divergence", "second")
LONGEST = 1_500  # characters of an error
TICK_S = 0.5  # between two looks at the GPU's memory
VOCABULARY = 64


def gpt(
    rows: int = 128,
    global_batch: int = 32,
    length: int = 32,
    layers: int = 8,
    heads: int = 4,
    width: int = 64,
    dropout: float = 0.0,
) -> Job:
    """A GPT on random tokens: 8 blocks for as many stages of a pipeline, and a batch for two micro-batches of each."""
    tokens = torch.randint(0, VOCABULARY, (rows + 32, length + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(VOCABULARY, length, layers=layers, heads=heads, width=width, dropout=dropout)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=TensorDataset(inputs[:rows], targets[:rows]),
        evaluation=TensorDataset(inputs[rows:], targets[rows:]),
        global_batch=global_batch,
        clip_norm=1.0,
    )


@dataclass(frozen=True)
class Case:
    """A row: what `samestep verify` is asked. arguments: but for the device."""

    name: str
    arguments: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Yields the rows: those that take longest first, so that the others run beside them."""
    job = f"{Path(__file__).resolve()}:gpt"
    for size in SIZES[::-1]:
        threads = ("--nproc", str(size), "--as", "threads", "--also", "none")
        yield Case(f"pipeline {size} threads", (job, "--engine", "pipeline", *threads))
    for engine in ALONE:
        yield Case(f"{engine} 1", ("digits", "--engine", engine, "--nproc", "1", "--also", "none"))
    for size in SIZES:
        for engine in SHARED:
            threads = ("--nproc", str(size), "--as", "threads", "--also", "none")
            yield Case(f"{engine} {size} threads", (job, "--engine", engine, *threads))
    mixture = str(Path(__file__).resolve().parents[1] / "examples" / "moe.py")
    for size in (2, 4):
        threads = ("--nproc", str(size), "--as", "threads", "--also", "none")
        yield Case(f"expert {size} threads", (mixture, "--engine", "expert", *threads))
    for engine, mesh in (("fsdp", "shard=2,tensor=2"), ("tensor", "data=2,tensor=2"), ("fsdp", "data=2,shard=2")):
        yield Case(f"{engine} {mesh} threads", (job, "--engine", engine, "--mesh", mesh, "--as", "threads"))
    for engine in ("ddp", "pipeline"):
        threads = ("--nproc", "2", "--as", "threads", "--also", "none", "--set", "dropout=0.1")
        yield Case(f"{engine} 2 threads dropout", (job, "--engine", engine, *threads))
    for size in (1, 2, 4):
        threads = ("--nproc", str(size), *(("--as", "threads") if size > 1 else ()), "--also", "none")
        yield Case(f"fsdp {size} offload", (job, "--engine", "fsdp", "--set-engine", "offload=true", *threads))
    yield Case("ddp 1 and second", ("digits", "--engine", "ddp"))  # as a user types it: the second number is of threads
    yield Case("amp 2 threads", (job, "--engine", "amp", "--nproc", "2", "--as", "threads", "--also", "none"))


class GpuMemory:
    """Samples the memory of GPUs that processes hold, in bytes. Without NVML it is not known."""

    def __init__(self) -> None:
        self._opened, self._ended = open_nvml(), threading.Event()
        self._roots: dict[int, int] = {}  # pid of a row's command -> its peak
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, pid: int) -> Iterator[dict[str, int | None]]:
        """Yields a record whose peak_gpu_bytes is known after the block."""
        record: dict[str, int | None] = {"peak_gpu_bytes": None}
        self._roots[pid] = 0
        yield record
        record["peak_gpu_bytes"] = self._roots.pop(pid) or None

    def _sample(self) -> None:
        while self._opened.handles and not self._ended.wait(TICK_S):
            held: dict[int, int] = {}
            with suppress(Exception):  # NVMLError has a class for each number, made at run time
                for handle in self._opened.handles:
                    for process in self._opened.nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                        held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
            for root in [*self._roots]:
                with suppress(psutil.Error, KeyError):
                    pids = {process.pid for process in psutil.Process(root).children(recursive=True)}
                    self._roots[root] = max(self._roots[root], sum(held.get(pid, 0) for pid in pids))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def proven(case: Case, options: argparse.Namespace, memory: GpuMemory) -> dict[str, Any]:
    """Runs one row, and returns its record."""
    row: dict[str, Any] = {"name": case.name, "at_once": options.at_once}
    with tempfile.TemporaryDirectory() as folder:
        line = ["verify", *case.arguments, "--device", options.device, *(["--quick"] if options.quick else [])]
        command = [sys.executable, "-m", "samestep", *line, "--json", "--out", f"{folder}/out"]
        row["line"] = " ".join(["samestep", *line])
        began = time.monotonic()
        with open(f"{folder}/stdout", "w+") as out, open(f"{folder}/stderr", "w+") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            with memory.watching(process.pid) as peak:
                try:
                    row["exit"] = process.wait(options.deadline)
                except subprocess.TimeoutExpired:
                    row["exit"] = "deadline"
                finally:
                    with suppress(ProcessLookupError):  # what it has started ends with it
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            row |= {"seconds": round(time.monotonic() - began, 1), **peak}
        text, errors = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        try:
            (found,) = json.loads(text)["engines"]
            row |= {key: found[key] for key in TOLD if found.get(key) is not None}
        except (ValueError, KeyError):
            row["stdout"] = text[-LONGEST:]
        if row["exit"] != 0:
            logs = sorted(Path(folder).glob("out/launches/*/log.txt"))
            row["stderr"] = errors[-LONGEST:]
            row["logs"] = {log.parent.name: log.read_text(errors="replace")[-LONGEST:] for log in logs}
            ranks = sorted(Path(folder).glob("out/launches/*/error-rank*.json"))
            row["errors"] = {rank.name: rank.read_text(errors="replace")[-LONGEST:] for rank in ranks[:2]}
    return row


def shown(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    gpu = row["peak_gpu_bytes"]
    memory = "-" if gpu is None else f"{gpu / 2**20:.0f} MiB"
    figures = [f"{row[key]:.2g}" if isinstance(row.get(key), float) else "-" for key in ("max_difference", "bound")]
    verdict = row.get("verdict", f"exit {row['exit']}")
    return f"{row['name']:<26} {row['seconds']:>7.1f} s  {verdict:<12} {figures[0]:>9} {figures[1]:>9} {memory:>10}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=200.0, help="seconds of a row")
    parser.add_argument("--quick", action="store_true", help="as of samestep verify")
    parser.add_argument("--only", nargs="+", action="append", metavar="WORD")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only or [[]]
    chosen = [case for case in cases() if any({*words} <= {*case.name.split()} for words in wanted)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    record: dict[str, Any] = {"machine": machine | {"gpus": [torch.cuda.get_device_name(n) for n in range(gpus)]}}
    record |= {"cases": len(chosen), "rows": []}
    memory, lock, began = GpuMemory(), threading.Lock(), time.monotonic()

    def run(case: Case) -> None:
        row = proven(case, options, memory)
        with lock:
            record["rows"].append(row)
            record["seconds"] = round(time.monotonic() - began, 1)
            replace_text(options.out / "rows.json", json.dumps(record, indent=1))
            print(shown(row), flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        for ended in [pool.submit(run, case) for case in chosen]:
            ended.result()
    memory.close()
    verdicts = [row.get("verdict", "none") for row in record["rows"]]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    print(f"{len(verdicts)} rows in {record['seconds']} s: {counts}")


if __name__ == "__main__":
    main()
