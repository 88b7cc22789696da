"""samestep monitor inside a rank of any script: tells what the rank is doing, and records nothing of the training.

`attach` is called once torch is imported. Each batch, optimizer step and process group is noted in the rank's
heartbeat, which the command reads. No tensor is looked at, no collective is called, no random number is drawn.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import _utils, dataloader, get_worker_info

from samestep.job.foreign import ById, is_a
from samestep.rank.hooks import Hooks
from samestep.recorder.first_waits import FirstWaits
from samestep.recorder.guards import Guard, fault_message
from samestep.recorder.leaving import Leaving, described
from samestep.records.rank_ends import END, RankEnd
from samestep.world.heartbeat import ENDING, LOADING, NONE, STARTING, TRAINING, file_of, heartbeat
from samestep.world.processes import STACKS, write_stacks
from samestep.world.regular_files import read_regular, remove_file

MOST_BYTES = 100  # the most bytes of a file that names a process
ITERATOR: Any = dataloader._BaseDataLoaderIter
FETCHERS: tuple[Any, ...] = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)

guard = Guard()
hooks = Hooks(guard)


def _say_fault(fault: Exception) -> None:
    heartbeat.leave()
    print(f"samestep monitor: this process is not monitored any more ({fault_message(fault)})", file=sys.stderr)


def attach(folder: Path) -> None:
    """Monitors this process, and those that it forks, where they turn out to be ranks. folder: for their files."""
    rank = MonitoredRank(folder)
    guard.begin(_say_fault)
    rank.patch_group()
    rank.patch_loaders()
    rank.note_errors()
    rank.patch_functions()
    rank.waits.patch(hooks)
    rank.leaving.patch_loads(hooks)
    rank.leaving.patch_exits(hooks, guard.hook(rank.exits))
    register_optimizer_step_post_hook(guard.hook(rank.stepped))
    os.register_at_fork(after_in_child=guard.hook(rank.forked))


def _tells_of_another_process(error: BaseException) -> bool:
    """Returns whether an exception is a launcher's, such as torchrun's, which a rank's end has raised there."""
    kinds = type(error).__mro__
    return any(kind.__module__.startswith(("torch.distributed.elastic.", "torch.multiprocessing.")) for kind in kinds)


class MonitoredRank:
    """This process as a rank. It becomes one with its process group, its first batch or its first optimizer step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = self._worker_pid = 0  # of the rank's process, and of this process if it is a loader worker
        self._beside = 0  # the process that would be a rank which another process is
        self._rank = 0
        self._thread = 0  # the thread that trains
        self._steps = 0
        self._hook: Any = None
        self._noted: BaseException | None = None  # the exception that was written down
        self.waits = FirstWaits(folder)
        self.leaving = Leaving(lambda: self._steps)

    def patch_group(self) -> None:
        """Makes a process a rank when it opens its process group: before, because others may never come."""

        def new_init(init: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("rank", -1)
            size = kwargs.get("world_size", -1)
            size = size if size > 0 else _number("WORLD_SIZE", 1)
            self._open(given if given >= 0 else _number("RANK", 0), size)
            if self._pid != os.getpid():
                return init(*args, **kwargs)
            from samestep.rank import flight_recorder  # here: most processes that import torch are no ranks

            flight_recorder.serve(self._folder, self._rank)
            with self.waits.of_group(self._rank, size, args, kwargs):
                result = init(*args, **kwargs)
            heartbeat.begin(TRAINING, self._steps)
            return result

        # The module whose functions a script may have imported.
        hooks.attach(dist, "init_process_group", new_init, sys.modules["torch.distributed.distributed_c10d"])

    def patch_loaders(self) -> None:
        """Notes when the training waits for a batch, and how long a batch takes to load."""
        begun = ById[None]()

        def new_next(next_batch: Any, iterator: Any) -> Any:
            if get_worker_info() is not None or not self._is_rank():
                return next_batch(iterator)
            heartbeat.begin(LOADING, self._steps)
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return next_batch(iterator)
            finally:
                if threading.get_ident() == self._thread:
                    took, cpu = time.perf_counter_ns() - began, time.thread_time_ns() - cpu
                    ahead = getattr(iterator, "_prefetch_factor", None) or 0  # a private name, that not every kind has
                    workers = getattr(iterator, "_num_workers", 0)
                    heartbeat.loaded(took, cpu, workers, ahead, first=workers > 0 and iterator not in begun)
                    begun.put(iterator, None)
                heartbeat.begin(TRAINING, self._steps)

        def new_fetch(fetch: Any, fetching: Any, index: Any) -> Any:
            if get_worker_info() and self._worker_pid != os.getpid():
                self._worker_pid = os.getpid()
                # Not by its number: two loaders that keep their workers have two of each.
                heartbeat.is_worker(self._worker_pid)
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return fetch(fetching, index)
            finally:
                heartbeat.fetched(time.perf_counter_ns() - began, time.thread_time_ns() - cpu)

        hooks.attach(ITERATOR, "__next__", new_next)
        for fetcher in FETCHERS:
            hooks.attach(fetcher, "fetch", new_fetch)

    def stepped(self, *_: Any) -> None:
        """Notes an optimizer step."""
        if torch.compiler.is_compiling() or not self._is_rank():
            return
        self._steps += 1
        heartbeat.step(self._steps, TRAINING)

    def forked(self) -> None:
        """Notes that this process was forked from a rank: it is none, until it does what ranks do."""
        heartbeat.leave()

    def _is_rank(self) -> bool:
        """Returns whether this process is a rank. One that a rank has forked becomes one by its process group alone."""
        if not self._pid:
            self._open(_number("RANK", 0), _number("WORLD_SIZE", 1))
        return self._pid == os.getpid()

    def _open(self, rank: int, size: int) -> None:
        """Becomes a rank, where no other process of this command is that one."""
        if os.getpid() in (self._pid, self._beside):
            return
        file = self._folder / f"pid-rank{rank}"
        if _is_alive(file):  # a second training, beside the first
            self._beside = os.getpid()
            return
        self._pid, self._rank, self._steps = os.getpid(), rank, 0
        self._thread = threading.get_ident()
        heartbeat.open(file_of(self._folder, rank))
        heartbeat.describe(size, threading.get_native_id())
        heartbeat.begin(STARTING)
        with suppress(OSError):
            # Of an attempt before a restart.
            for old in (self._folder / f"error-rank{rank}.json", self._folder / END.format(rank), file):
                remove_file(old)
            write_stacks(self._folder / f"stack-rank{rank}.txt", STACKS)
        from samestep.records.files import replace_text  # here: most processes that import torch are no ranks

        with suppress(OSError):
            replace_text(file, f"{os.getpid()}@{socket.gethostname()}")
        if sys.excepthook is not self._hook:  # the script's own, since torch was imported
            self.note_errors()
        atexit.register(guard.hook(self._ends))

    def exits(self) -> None:
        """Writes down that a process leaves by sys.exit which would have become a rank."""
        rank = _number("RANK", NONE)
        if (
            not self._pid
            and rank != NONE
            and not self.waits.is_launcher
            and not _is_alive(self._folder / f"pid-rank{rank}")
        ):
            self._write_end(rank)

    def _ends(self) -> None:
        if self._pid == os.getpid():
            heartbeat.begin(ENDING, self._steps)
            self._write_end(self._rank)

    def _write_end(self, rank: int) -> None:
        from samestep.records.files import write

        with suppress(Exception):
            write(self._folder / END.format(rank), RankEnd(rank, self.leaving.reason, _last_collective()))

    def note_errors(self) -> None:
        """Writes down the exception that ends the rank, and lets it be printed as before."""
        before = sys.excepthook

        def new_hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            guard.hook(self._note)(error, _number("RANK", NONE))
            before(kind, error, trace)

        self._hook = sys.excepthook = new_hook

    def patch_functions(self) -> None:
        """Writes down the exception of a function that is a process of its own: whoever calls it there catches it."""

        def new_wrap(wrap: Any, function: Callable[..., Any], index: int, *arguments: Any) -> Any:
            return wrap(self._noting(function, index), index, *arguments)

        def new_run(run: Any, process: BaseProcess) -> None:
            self._noting(run, _number("RANK", NONE))(process)

        # Pickled by its name, which a spawned process finds in its own torch: monitored there, or as torch has it. The
        # module by its name, too, which the function spawn hides.
        hooks.attach(sys.modules["torch.multiprocessing.spawn"], "_wrap", new_wrap)
        hooks.attach(BaseProcess, "run", new_run)

    def _noting(self, function: Callable[..., Any], rank: int) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except Exception as error:
                guard.hook(self._note)(error, rank)
                raise
            except SystemExit as error:
                self.leaving.left(error)
                guard.hook(self._ends)()
                raise
            guard.hook(self._ends)()  # a forked process ends without what is registered for its exit
            return result

        return called

    def _note(self, error: BaseException, rank: int) -> None:
        """Writes an exception down, once. rank: that this process would have become; NONE: none that is known."""
        if is_a(error, KeyboardInterrupt) or error is self._noted or _tells_of_another_process(error):
            return
        if not self._pid and rank != NONE and not _is_alive(self._folder / f"pid-rank{rank}"):
            self._pid, self._rank = os.getpid(), rank
        if self._pid == os.getpid():
            self._noted = error
            with suppress(Exception):
                self._write(error)

    def _write(self, error: BaseException) -> None:
        from samestep.rank.membership import says_lost
        from samestep.records.files import write
        from samestep.records.record import RankError

        trace = "".join(traceback.format_exception(error))
        path = self._folder / f"error-rank{self._rank}.json"
        write(path, RankError(self._rank, "crash", described(error), time.time(), trace, says_lost(error)))


def _last_collective() -> str | None:
    """Returns the collective that this rank has entered last, of the group of all ranks."""
    flight_recorder = sys.modules.get("samestep.rank.flight_recorder")  # imported with the process group
    entries = flight_recorder.read() if flight_recorder else ()
    entered = [entry for entry in entries if entry.is_of_all_ranks and not entry.is_p2p]
    last = max(entered, key=lambda entry: entry.collective_seq_id, default=None)
    return f"{last.operation} #{last.collective_seq_id}" if last else None


def _is_alive(file: Path) -> bool:
    """Returns whether the process that a pid file names lives."""
    with suppress(OSError, ValueError):
        return os.path.exists(f"/proc/{int(read_regular(file, MOST_BYTES).partition(b'@')[0])}")
    return False


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise
