"""Arrays on the disk are the same rows as in memory, shared out alike, and are never all in memory."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from budget import budget
from conformance import jobs_drawn
from samestep.data.arrays import Arrays
from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.errors import UserError
from samestep.job import Job
from samestep.world import World


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """29 rows: inputs in files of 10, 0, 12 and 7 of them, targets in one of 5 and one of 24."""
    inputs = np.random.default_rng(0).normal(size=(29, 3, 2)).astype(np.float32)
    for number, piece in enumerate(np.split(inputs, [10, 10, 22])):
        np.save(tmp_path / f"inputs-{number}.npy", piece)
    for number, piece in enumerate(np.split(np.arange(29), [5])):
        np.save(tmp_path / f"targets-{number}.npy", piece)
    return tmp_path


def opened(folder: Path) -> Arrays:
    return Arrays(sorted(folder.glob("inputs-*")), sorted(folder.glob("targets-*")))


def in_memory(folder: Path) -> TensorDataset:
    columns = (sorted(folder.glob(f"{name}-*")) for name in ("inputs", "targets"))
    return TensorDataset(*(torch.from_numpy(np.concatenate([np.load(path) for path in paths])) for paths in columns))


def job_of(data: object, workers: int = 0) -> Job:
    return replace(jobs_drawn.job(), train=data, workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_they_are_the_rows_that_memory_would_give(folder: Path, workers: int) -> None:
    arrays, memory = opened(folder), in_memory(folder)
    assert len(arrays) == 29
    of_all = [
        [b.data for b in batches(job_of(data, workers), World(), schedule_of(job_of(data), 1), 9)]
        for data in (arrays, Subset(arrays, range(29)), memory)  # at once, row by row, and from memory
    ]
    for at_once, by_row, theirs in zip(*of_all, strict=True):
        for x, y, z in zip(at_once, by_row, theirs, strict=True):
            assert x.dtype == y.dtype == z.dtype
            assert torch.equal(x, y) and torch.equal(x, z)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_is_seen_once_an_epoch_on_any_number_of_ranks(folder: Path, size: int) -> None:
    job = job_of(opened(folder))
    schedule = schedule_of(job, size)
    for epoch in (0, 1):
        seen = Counter(
            int(target)
            for rank in range(size)
            for batch in batches(job, World(rank=rank, size=size), schedule, 2 * schedule.steps_per_epoch)
            if batch.micro_batch.epoch == epoch
            for target in batch.data[1][: batch.micro_batch.rows]
        )
        assert seen == Counter(range(29))


def test_one_column_and_single_rows(folder: Path) -> None:
    arrays = opened(folder)
    assert [int(arrays[index][1]) for index in (0, 4, 5, 28, -1)] == [0, 4, 5, 28, 28]
    with pytest.raises(IndexError, match="row 29"):
        arrays[29]
    alone = Arrays(sorted(folder.glob("targets-*")))
    assert alone[7] == 7 and alone.take(np.array([28, 0])).tolist() == [28, 0]


def test_pickled_it_is_its_paths(folder: Path) -> None:
    arrays = opened(folder)
    pickled = pickle.dumps(arrays)
    assert len(pickled) < 3000 and (pickle.loads(pickled)[13][0] == arrays[13][0]).all()


def test_what_does_not_fit_is_said(folder: Path) -> None:
    with pytest.raises(UserError, match=r"columns.* 29, 24"):
        Arrays(sorted(folder.glob("inputs-*")), [folder / "targets-1.npy"])
    np.save(folder / "inputs-9.npy", np.zeros((2, 4)))
    with pytest.raises(UserError, match=r"inputs-9.npy.*float64\[4\].*float32\[3, 2\]"):
        opened(folder)
    np.save(folder / "objects.npy", np.array([{}]))
    for files, sentence in (
        ([], "has no .npy files"),
        ([folder / "nowhere.npy"], "nowhere.npy cannot be mapped"),
        ([folder / "objects.npy"], "objects.npy cannot be mapped"),
    ):
        with pytest.raises(UserError, match=sentence):
            Arrays(files)


@pytest.mark.check
def test_memory_stays_small(tmp_path: Path) -> None:
    """256 MiB of rows, an epoch of them, in a process that counts what it holds itself (the system's cache is not)."""
    np.save(tmp_path / "inputs-0.npy", np.zeros((2**14, 2**12), np.float32))
    np.save(tmp_path / "targets-0.npy", np.zeros(2**14, np.int64))
    script = f"""
import re
from dataclasses import replace
from pathlib import Path
from conformance import jobs_drawn
from data.test_arrays import opened
from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.world import World

def held_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before, most, rows = held_mib(), 0.0, 0
job = replace(jobs_drawn.job(), train=opened(Path({str(tmp_path)!r})), global_batch=64)
for batch in batches(job, World(), schedule_of(job, 1), 256):
    most, rows = max(most, held_mib()), rows + len(batch.data[0])
print(rows, most - before)
"""
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, timeout=budget())
    assert done.returncode == 0, done.stderr
    rows, grown_mib = done.stdout.split()
    assert int(rows) == 2**14
    assert float(grown_mib) < 64
