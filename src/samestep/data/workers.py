"""Loading in other processes, with torch's DataLoader: parts in order, and a sentence for each way it can fail."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import get_all_start_methods
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from samestep.errors import LoadingFailed, UserError, notes
from samestep.job import Part
from samestep.world.orphans import die_with_parent

FULL = "No space left|unable to (write|allocate|resize|open).*shared memory|unable to write to file </torch_"
SHARED = "/dev/shm"
GONE_S = 1.0


class Fetched(NamedTuple):
    """A part and its data. seconds: what fetching took in the process that did it; cpu_s: how long a processor worked
    for it."""

    part: Part
    data: Any
    seconds: float
    cpu_s: float


def fetched(rows: Any, parts: Iterable[Part], workers: int, prefetch: int) -> Generator[Fetched, None, None]:
    """rows[part] of each of `parts`, in order, by `workers` processes that work on `prefetch` parts ahead, each.

    Iterate it in one thread: where the system can, the processes end with the thread that started them.
    Raises UserError as the dataset raised it, and for shared memory that is full; LoadingFailed for all else.
    """
    loader = DataLoader(
        _InWorker(rows),
        sampler=_Parts(parts),
        batch_size=None,  # a part is fetched and collated whole
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=prefetch,
        # Under torch.multiprocessing.spawn the default would be 'spawn', which cannot take a job's lambdas.
        multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
        worker_init_fn=die_with_parent,
        generator=torch.Generator(),  # its own: starting a loader must not draw from the training's stream
    )
    iterator = iter(loader)
    try:
        while (answer := next(iterator, None)) is not None:
            part, seconds, cpu_s, pickled, failure = answer
            if failure is not None:
                raise failure.error()
            # Opens the shared memory, for which the worker that made it must be alive.
            yield Fetched(part, pickle.loads(pickled), seconds, cpu_s)
    except (RuntimeError, OSError, EOFError) as error:
        raise _said(error, getattr(iterator, "_workers", [])) from error
    finally:
        # torch's own, called when the iterator is forgotten; but an error's traceback remembers it.
        getattr(iterator, "_shutdown_workers", lambda: None)()


class _InWorker(Dataset[Any]):
    """What a worker process runs. It raises nothing, because torch would make one text of error and traceback."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, part: Part) -> tuple[Part, float, float, bytes, _Failure | None]:
        start, worked = time.perf_counter(), time.process_time()
        try:
            _, data = self.rows[part]
            # Here, and not in the queue's own thread: what fails there is lost, and training would wait for ever.
            pickled = bytes(ForkingPickler.dumps(data))
        except Exception as error:
            return part, 0.0, 0.0, b"", _Failure.of(error, part)
        return part, time.perf_counter() - start, time.process_time() - worked, pickled, None


class _Failure(NamedTuple):
    """An error on its way to another process: its own class may not survive being pickled."""

    sentence: str
    users: bool  # whether the mistake is the user's
    text: str  # the traceback

    @classmethod
    def of(cls, error: Exception, part: Part) -> _Failure:
        if isinstance(error, UserError):
            return cls(str(error), True, traceback.format_exc())
        if re.search(FULL, str(error)):
            return cls(_full(), True, traceback.format_exc())
        return cls(str(failed(error, part)), False, traceback.format_exc())

    def error(self) -> Exception:
        error: Exception = UserError(self.sentence) if self.users else LoadingFailed(self.sentence)
        try:  # raised, so that what is printed of it begins as every traceback does
            raise _Told(f"in a loader worker:\n{self.text}")
        except _Told as told:  # as concurrent.futures does it
            error.__cause__ = told
        return error


class _Told(Exception):
    """A traceback of another process, as text."""


def failed(error: Exception, part: Part) -> LoadingFailed:
    """The sentence about an error in the job's dataset, augment or collate."""
    some = ", ".join(map(str, part.indices[:3].tolist())) + (", …" if len(part.indices) > 3 else "")
    where = f"at {notes(error)[0]}" if notes(error) else f"among samples {some}"
    first = (str(error).strip().splitlines() or [""])[0]
    return LoadingFailed(f"loading the rows of step {part.step} failed {where}: {type(error).__name__}: {first}")


def _said(error: BaseException, workers: list[Any]) -> Exception:
    """The sentence about a worker that is no more, or else the error itself."""
    # A process that dies closes its lines before the system counts it as dead.
    ended = wait([worker.sentinel for worker in workers], timeout=GONE_S)
    for worker in workers:
        worker.join(GONE_S if worker.sentinel in ended else 0)
    dead = [worker for worker in workers if not worker.is_alive()]
    if not dead:
        return LoadingFailed(f"a batch did not come over from a loader worker: {type(error).__name__}: {error}")
    pid, code = dead[0].pid, dead[0].exitcode or 0
    if -code == signal.SIGBUS:
        return UserError(_full())
    if code >= 0:
        return LoadingFailed(
            f"a loader worker (process {pid}) exited with code {code} in the middle of its work; "
            "let the dataset raise an error instead of ending the process"
        )
    why = (
        "by hand, by a scheduler, or by the kernel for want of memory: fewer workers, or a smaller prefetch, need less"
        if -code == signal.SIGKILL
        else "a library that the dataset calls has crashed; workers=0 shows where"
    )
    return LoadingFailed(f"a loader worker (process {pid}) was ended by {signal.Signals(-code).name} ({why})")


def _full() -> str:
    try:
        found = os.statvfs(SHARED)
        free, whole = (blocks * found.f_frsize / 2**20 for blocks in (found.f_bavail, found.f_blocks))
        size = f" ({free:.0f} of {whole:.0f} MiB free)"
    except OSError:
        size = ""
    return (
        f"{SHARED}, through which loader workers hand batches over, is full{size}; give it more (docker run "
        "--shm-size=8g; Kubernetes: an emptyDir in memory), or use fewer workers, a smaller prefetch, or workers=0"
    )


def _as_it_is(answer: Any) -> Any:
    return answer


class _Parts(Sampler[Any]):
    """Parts of a schedule as a torch sampler: they are the loader's 'indices'."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)
