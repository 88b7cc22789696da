"""One rank of a doctor's trial: it meets the others as torch's env:// does, and runs fixed products and all-reduces."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from samestep.doctor.machine import Trial, TrialRecord
from samestep.doctor.records import TrialRank
from samestep.rank.membership import in_time, leave_together
from samestep.records.files import read, write
from samestep.world.network import bound

WIDTH, PRODUCTS, BLOCKS = 512, 12, 5
REDUCED = 1 << 20  # float32 elements: 4 MiB
SLOW_S = 0.2  # an all-reduce that takes longer is measured twice instead of seven times


def try_main(path: str) -> None:
    """Runs the rank that the file `path` describes, and writes what it measured to tried-RANK.json beside it."""
    told = read(TrialRank, Path(path))
    trial, record = told.trial, TrialRecord(told.rank, backend=_backend(told.trial))
    torch.set_num_threads(1)
    try:
        record = in_time(4 * trial.wait_s, lambda: _run(trial, record, told.listening))
    except BaseException as error:
        words = (str(error).strip().splitlines() or [""])[0]
        record = replace(record, error=f"{type(error).__name__}: {words}"[:300])
    write(Path(path).with_name(f"tried-{told.rank}.json"), record)
    os._exit(0)  # a group that has failed may wait for ever


def _backend(trial: Trial) -> str:
    usable = trial.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= trial.local_size
    return "nccl" if usable and dist.is_nccl_available() else "gloo"


def _run(trial: Trial, record: TrialRecord, listening: int | None) -> TrialRecord:
    began, wait = time.monotonic(), timedelta(seconds=trial.wait_s)
    device = torch.device("cpu")
    if record.backend == "nccl":
        device = torch.device("cuda", record.rank - trial.first_rank)
        torch.cuda.set_device(device)
    if listening is None and record.rank == 0:
        listening = bound(trial.master, trial.port).detach()
    store = TCPStore(
        trial.master, trial.port, trial.size, record.rank == 0, wait, wait_for_workers=False, master_listen_fd=listening
    )
    group = PrefixStore("trial", store)
    in_time(  # gloo ignores the timeout while it connects
        trial.wait_s + 2,
        lambda: dist.init_process_group(
            record.backend, store=group, rank=record.rank, world_size=trial.size, timeout=wait
        ),
    )
    dist.barrier()
    met = time.monotonic() - began
    matmul_s = _matmul_s(device)
    reduce_s = _all_reduce_s(device)
    leave_together(store, trial.size, holds_store=record.rank == 0, wait_s=trial.wait_s)
    return replace(record, meet_s=met, matmul_s=matmul_s, all_reduce_s=reduce_s)


def _matmul_s(device: torch.device) -> float:
    """Returns the seconds of a block of products: the best of some, so that a passing disturbance does not count."""
    left = torch.ones(WIDTH, WIDTH, device=device)
    right = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device)
    times = []
    for _ in range(BLOCKS):
        began = time.monotonic()
        for _ in range(PRODUCTS):
            left = left @ right
        _wait(device)
        times.append(time.monotonic() - began)
    return min(times)


def _all_reduce_s(device: torch.device) -> float:
    """Returns the median seconds of an all-reduce. Raises ValueError for a wrong sum."""
    tensor = torch.ones(REDUCED, device=device)
    began = time.monotonic()
    dist.all_reduce(tensor)
    _wait(device)
    if float(tensor[0]) != dist.get_world_size() or float(tensor[-1]) != dist.get_world_size():
        raise ValueError(f"an all-reduce of ones gave {float(tensor[0])} on {dist.get_world_size()} ranks")
    first = torch.tensor([time.monotonic() - began], device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX)  # all ranks must choose the same number
    times = []
    for _ in range(2 if float(first) > SLOW_S else 7):
        tensor.fill_(1.0)
        began = time.monotonic()
        dist.all_reduce(tensor)
        _wait(device)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
