"""Each way in which loading can fail, provoked for real: a sentence, no hang, no process left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset, _utils, dataloader

from budget import budget, deadline
from command import TESTS, samestep
from data import jobs_failing
from data.test_pipeline import in_time
from said import says, tells
from samestep.data.loader import Rows, batches
from samestep.data.schedule import schedule_of
from samestep.data.workers import fetched
from samestep.errors import LoadingFailed, UserError
from samestep.job import Batch, Job
from samestep.world import World

FAILING = f"{Path(jobs_failing.__file__)}:job"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader looks every 5 s whether its workers are alive."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=budget(20))
    assert not left


def loaded(job: Job, steps: int = 16) -> tuple[list[Batch], BaseException | None]:
    """The batches that arrive, and the error that ends them."""
    seen: list[Batch] = []

    def load() -> BaseException | None:
        try:
            for batch in batches(job, World(), schedule_of(job, 1), steps):
                seen.append(batch)
        except BaseException as error:
            return error
        return None

    return seen, in_time(load)


def step_of(index: int, job: Job) -> int:
    """The step of the first epoch that holds sample `index`."""
    order = schedule_of(job, 1).order(0).tolist()
    return int(order.index(index) // job.global_batch)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_names_its_sample(workers: int, by_batch: bool) -> None:
    job = jobs_failing.job("raises", workers, by_batch)
    seen, error = loaded(job)
    step = step_of(37, job)
    assert len(seen) == step  # all that came before it
    assert isinstance(error, LoadingFailed)
    says(error.message, "rows_not_loaded", step=step, error="ValueError: no such thing")
    if by_batch:
        assert 37 in error.message.fields["rows"]
    else:
        says(error.message, "rows_not_loaded", place="sample 37", rows=None)
    assert "jobs_failing.py" in "".join(traceback.format_exception(error))  # the job's own line, to look it up


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_stays_its_own_sentence(workers: int) -> None:
    _, error = loaded(jobs_failing.job("users", workers))
    assert type(error) is UserError
    assert str(error) == jobs_failing.UNREADABLE


@pytest.mark.parametrize(
    ("how", "said", "fields"),
    [
        ("killed", "loader_worker_killed", {"signal": "SIGKILL"}),
        ("aborts", "loader_worker_crashed", {"signal": "SIGABRT"}),
        ("exits", "loader_worker_exited", {"code": 3}),
    ],
)
def test_a_worker_that_dies_is_named(how: str, said: str, fields: dict[str, object]) -> None:
    job = jobs_failing.job(how)
    seen, error = loaded(job)
    assert len(seen) <= step_of(37, job)
    assert isinstance(error, LoadingFailed)
    says(error.message, said, **fields)
    assert error.message.fields["process"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_collate_says_which_samples(workers: int) -> None:
    _, error = loaded(jobs_failing.job(workers=workers, collate="raises"))
    assert isinstance(error, LoadingFailed) and len(error.message.fields["rows"]) > 3
    says(error.message, "rows_not_loaded", step=0, place=None, error="KeyError: 'label'")


def test_what_cannot_be_handed_over_is_told_and_not_lost() -> None:
    """torch pickles in a thread of the queue, prints the error there, and then waits for ever."""
    _, error = loaded(jobs_failing.job(collate="unpicklable"))
    assert isinstance(error, LoadingFailed)
    says(error.message, "rows_not_loaded", step=0)
    assert "pickle" in error.message.fields["error"]


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_workers_end_even_where_their_error_is_kept(how: str) -> None:
    """In a thread that lives on, because its end would end them. The traceback remembers the loader they belong to."""
    job = jobs_failing.job(how)
    before = set(psutil.Process().children(recursive=True))
    kept: list[BaseException] = []
    failed, seen = threading.Event(), threading.Event()

    def load() -> None:
        try:
            list(fetched(Rows(job), schedule_of(job, 1).micro_batches_of(0, 16), 2, 2))
        except LoadingFailed as error:
            kept.append(error)
        failed.set()
        seen.wait(budget(40))

    threading.Thread(target=load, daemon=True).start()
    assert failed.wait(budget(20)) and kept
    started = set(psutil.Process().children(recursive=True)) - before
    _, left = psutil.wait_procs(started, timeout=budget(5))
    seen.set()
    assert not left


def test_leaving_in_the_middle_leaves_no_process() -> None:
    def leave() -> int:
        for batch in batches(jobs_failing.job(), World(), schedule_of(jobs_failing.job(), 1), 16):
            return len(batch.data[0])
        return 0

    assert in_time(leave) == 8


def _in_small_shm(command: list[str], mebibytes: int) -> subprocess.CompletedProcess[str]:
    """`command` where /dev/shm is so small, in a mount namespace of its own."""
    script = f'mount -t tmpfs -o size={mebibytes}m none /dev/shm && exec "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *command], capture_output=True, text=True, timeout=budget(120)
    )


def _can_mount() -> bool:
    return bool(shutil.which("unshare")) and os.geteuid() == 0 and _in_small_shm(["true"], 1).returncode == 0


@pytest.mark.check
@pytest.mark.parametrize("collate", ["", "unshared"])
def test_a_full_shared_memory_says_what_to_do(collate: str, tmp_path: Path) -> None:
    if not _can_mount():
        assert "CI" not in os.environ, "no mount namespace can be made here"
        pytest.skip("no mount namespace can be made here")
    settings = ["--set", "how=wide", *(["--set", f"collate={collate}"] if collate else [])]
    command = [sys.executable, "-m", "samestep", "run", FAILING, "--engine", "single", *settings]
    done = _in_small_shm([*command, *deadline(), "--out", str(tmp_path / "out")], 20)
    assert done.returncode == 2, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "/dev/shm" in line]
    assert tells(said, "batches_found_no_shared_memory", folder="/dev/shm", total=20), said


class Growing(TensorDataset):
    """Has more samples after its first epoch."""

    more = 0

    def set_epoch(self, epoch: int) -> None:
        self.more = epoch

    def __len__(self) -> int:
        return super().__len__() + self.more


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_whose_length_changes_is_told(workers: int) -> None:
    job = replace(jobs_failing.job(), train=Growing(torch.ones(16, 4), torch.zeros(16)), epochs=2, workers=workers)
    seen, error = loaded(job, 2 * (16 // job.global_batch))
    assert len(seen) == 16 // job.global_batch
    assert type(error) is UserError
    says(error.message, "length_of_dataset_changes", samples=17, epoch=1, at_start=16)


@pytest.mark.check
@pytest.mark.parametrize("kibibytes", [4, 16])
def test_a_shared_memory_without_room_for_a_lock_says_so(kibibytes: int) -> None:
    """Which a worker needs before its first batch."""
    if not _can_mount():
        assert "CI" not in os.environ, "no mount namespace can be made here"
        pytest.skip("no mount namespace can be made here")
    script = (
        "from data import jobs_failing, test_workers\n"
        "from samestep.errors import UserError\n"
        "_, error = test_workers.loaded(jobs_failing.job(workers=2))\n"
        "assert type(error) is UserError and str(error).startswith('/dev/shm, through which'), error\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    mount = f'mount -t tmpfs -o size={kibibytes}k none /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=budget(),
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("users", 2, jobs_failing.UNREADABLE),
        ("raises", 1, "rank 0 failed: loading the rows of step"),
        ("killed", 1, "rank 0 failed: a loader worker (process "),
    ],
)
def test_the_command_says_it_in_one_sentence(how: str, code: int, sentence: str, tmp_path: Path) -> None:
    settings = ["--set", f"how={how}", "--set", "workers=1"]
    began = time.monotonic()
    done = samestep("run", FAILING, "--engine", "single", *settings, *deadline(), out=tmp_path / "out")
    assert time.monotonic() - began < budget()  # the deadline did not end it
    assert done.returncode == code, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if sentence in line]
    assert "Traceback" not in done.stderr
    if how == "raises":
        assert "sample 37: ValueError" in said
        log = next(tmp_path.glob("out/**/rank0.log")).read_text()
        assert "jobs_failing.py" in log
        assert log.startswith("Traceback"), log  # what is held back until the run has failed begins there


@pytest.mark.check
def test_a_worker_that_dies_in_the_middle_of_handing_over_is_named() -> None:
    """Again and again: what breaks first, the line or the queue, is a matter of luck."""
    for _ in range(3):
        _, error = loaded(jobs_failing.job("killed", workers=1))
        assert isinstance(error, LoadingFailed)
        says(error.message, "loader_worker_killed", signal="SIGKILL")
