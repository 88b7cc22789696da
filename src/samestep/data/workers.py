"""Loads data in worker processes with torch's DataLoader, and explains in one sentence how a worker failed."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_all_start_methods
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from samestep.errors import LoadingFailed, UserError, notes
from samestep.job import MicroBatch
from samestep.message import Message, message
from samestep.world.heartbeat import heartbeat
from samestep.world.processes import die_with_parent

SHARED_MEMORY_FULL = (
    "No space left|unable to (write|allocate|resize|open).*shared memory|unable to write to file </torch_"
)
SHARED_MEMORY = "/dev/shm"
EXIT_WAIT_S = 1.0  # for the system to report that a worker has died


class Fetched(NamedTuple):
    """A micro-batch and its data. seconds, cpu_s: wall-clock and CPU time of loading it, in the process that did."""

    micro_batch: MicroBatch
    data: Any
    seconds: float
    cpu_s: float


def fetched(
    rows: Any, micro_batches: Iterable[MicroBatch], workers: int, prefetch: int
) -> Generator[Fetched, None, None]:
    """Yields rows[micro_batch] for each micro-batch in order, loaded by `workers` processes, each `prefetch` ahead.

    Iterate it in one thread: on Linux the processes end with the thread that started them.
    Raises a UserError of the dataset unchanged, UserError when shared memory is full, else LoadingFailed.
    """
    loader = DataLoader(
        _InWorker(rows),
        sampler=_MicroBatches(micro_batches),
        batch_size=None,  # a micro-batch is one batch, collated by `rows`
        collate_fn=_identity,
        num_workers=workers,
        prefetch_factor=prefetch,
        # Inside torch.multiprocessing.spawn the default would be 'spawn', which cannot pickle a job's lambdas.
        multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # starting a loader must not draw from the training's generator
    )
    try:
        iterator = iter(loader)
    except OSError as error:
        raise _cannot_start(error, workers) from error
    try:
        while (answer := next(iterator, None)) is not None:
            micro_batch, seconds, cpu_s, pickled, failure = answer
            if failure is not None:
                raise failure.error()
            # Unpickling opens the shared memory, which needs the worker that created it.
            yield Fetched(micro_batch, pickle.loads(pickled), seconds, cpu_s)
    except (RuntimeError, OSError, EOFError) as error:
        raise _explained(error, getattr(iterator, "_workers", [])) from error
    finally:
        # torch calls it when the iterator is deleted, but an error's traceback keeps the iterator alive.
        getattr(iterator, "_shutdown_workers", lambda: None)()


def _begin_worker(number: int) -> None:
    die_with_parent()
    heartbeat.is_worker(number)


class _InWorker(Dataset[Any]):
    """The dataset in a worker process. It returns errors, because torch would turn a raised one into text."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, float, float, bytes, _Failure | None]:
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            _, data = self.rows[micro_batch]
            # Pickled here, not in the queue's thread: an error there is lost, and training would wait for ever.
            pickled = bytes(ForkingPickler.dumps(data))
        except Exception as error:
            return micro_batch, 0.0, 0.0, b"", _Failure.of(error, micro_batch)
        return micro_batch, time.perf_counter() - start, time.process_time() - cpu_start, pickled, None


class _Failure(NamedTuple):
    """An error as a message, for the training process: its class may not be picklable."""

    said: Message
    is_user_error: bool
    traceback: str

    @classmethod
    def of(cls, error: Exception, micro_batch: MicroBatch) -> _Failure:
        if isinstance(error, UserError):
            return cls(error.message, True, traceback.format_exc())
        if re.search(SHARED_MEMORY_FULL, str(error)):
            return cls(_shared_memory_message(), True, traceback.format_exc())
        return cls(failed(error, micro_batch).message, False, traceback.format_exc())

    def error(self) -> Exception:
        error: Exception = UserError(self.said) if self.is_user_error else LoadingFailed(self.said)
        try:  # raised, so that it is printed with a traceback's usual head
            raise _RemoteTraceback(f"in a loader worker:\n{self.traceback}")
        except _RemoteTraceback as remote:  # as in concurrent.futures
            error.__cause__ = remote
        return error


class _RemoteTraceback(Exception):
    """The traceback of a worker process, as text."""


def failed(error: Exception, micro_batch: MicroBatch) -> LoadingFailed:
    """Returns the error for an exception in the job's dataset, augment or collate."""
    return LoadingFailed(
        message(
            "rows_not_loaded",
            step=micro_batch.step,
            place=notes(error)[0] if notes(error) else None,
            rows=None if notes(error) else micro_batch.indices.tolist(),
            error=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
        )
    )


def _explained(error: BaseException, workers: list[Any]) -> Exception:
    """Returns the error for a worker that has died, or else for what torch's loader raised."""
    # A dying process closes its pipes before the system reports its exit.
    ended = wait([worker.sentinel for worker in workers], timeout=EXIT_WAIT_S)
    for worker in workers:
        worker.join(EXIT_WAIT_S if worker.sentinel in ended else 0)
    dead = [worker for worker in workers if not worker.is_alive()]
    if not dead:
        return LoadingFailed(message("batch_not_received_from_worker", error=f"{type(error).__name__}: {error}"))
    pid, code = dead[0].pid, dead[0].exitcode or 0
    if -code == signal.SIGBUS:
        return UserError(_shared_memory_message())
    if code >= 0:
        return LoadingFailed(message("loader_worker_exited", process=pid, code=code))
    ended_by = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return LoadingFailed(message("loader_worker_killed", process=pid, signal=ended_by))
    return LoadingFailed(message("loader_worker_crashed", process=pid, signal=ended_by))


def _cannot_start(error: OSError, workers: int) -> UserError:
    """Returns the error for workers that the system does not start; each needs locks in shared memory."""
    if error.errno == errno.ENOSPC:
        return UserError(_shared_memory_message())
    return UserError(f"{workers} loader workers cannot be started here ({error.strerror}); use fewer, or workers=0")


def _shared_memory_message() -> Message:
    sizes: dict[str, int | None] = {"free": None, "total": None}
    with suppress(OSError):
        stats = os.statvfs(SHARED_MEMORY)
        blocks = {"free": stats.f_bavail, "total": stats.f_blocks}
        sizes |= {name: round(number * stats.f_frsize / 2**20) for name, number in blocks.items()}
    return message("batches_found_no_shared_memory", folder=SHARED_MEMORY, **sizes)


def _identity(answer: Any) -> Any:
    return answer


class _MicroBatches(Sampler[Any]):
    """A sampler over the micro-batches of a schedule: each is one 'index' of the loader."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)
