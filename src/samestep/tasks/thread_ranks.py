"""Ranks as threads of one process, with the process group that torch's own tests use for it."""

from __future__ import annotations

import io
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

import _pytest
import pluggy
import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from samestep.rank import flight_recorder
from samestep.records.rank_tests import RankState, RunTest

THREAD = "samestep rank "  # and the rank: a thread's name


def call(size: int, function: Callable[[], object]) -> dict[int, pytest.CallInfo[None] | None]:
    """Calls a function in `size` threads, each a rank of a group.

    Returns for each rank how the call ended; None for one that was stopped in a collective because another rank failed.
    """
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    calls: dict[int, pytest.CallInfo[None] | None] = {}
    store = _distributed_c10d.HashStore()
    failed = threading.Event()

    def rank_main(rank: int) -> None:
        def opened() -> None:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            function()

        ended = pytest.CallInfo.from_call(opened, when="call")
        stopped = ended.excinfo is not None and isinstance(ended.excinfo.value, SystemExit) and failed.is_set()
        calls[rank] = None if stopped else ended
        if ended.excinfo is not None and not stopped:
            failed.set()
            ProcessLocalGroup.exception_handle(ended.excinfo.value)  # wakes those that wait for this rank
        if dist.is_initialized():
            dist.destroy_process_group()

    isolate: Callable[[bool], None] = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    _install_threaded_pg()
    try:
        with Labelled(sys.stdout) as out, Labelled(sys.stderr) as err, redirect_stdout(out), redirect_stderr(err):
            names = [f"{THREAD}{rank}" for rank in range(size)]
            threads = [threading.Thread(target=rank_main, args=(n,), name=name) for n, name in enumerate(names)]
            for thread in threads:
                thread.daemon = True
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        isolate(False)
    return dict(sorted(calls.items()))


class Labelled(io.TextIOBase):
    """A stream that writes a rank's lines with '[rank 3]' before them; what other threads write stays as it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._partial: dict[str, str] = {}  # a thread's name -> the beginning of a line

    def write(self, text: str) -> int:
        name = threading.current_thread().name
        if not name.startswith(THREAD):
            return self._stream.write(text)
        *lines, self._partial[name] = (self._partial.get(name, "") + text).split("\n")
        self._stream.write("".join(f"{_label(name)}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Writes the lines that have no end. The stream stays open."""
        for name, text in self._partial.items():
            if text:
                self._stream.write(f"{_label(name)}{text}\n")
        self._partial = {}


def _label(name: str) -> str:
    return f"[rank {name.removeprefix(THREAD)}] "


RUNNERS = tuple(str(Path(module.__file__).parent) for module in (_pytest, pluggy) if module.__file__)


def states(test: RunTest | None) -> tuple[RankState, ...]:
    """Returns what each rank of this process is doing. Call it from another thread than the test's."""
    if test is None:
        return ()
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    frames = sys._current_frames()
    if test.threads:
        idents = {rank: threads.get(f"{THREAD}{rank}") for rank in range(test.size)}
    else:
        idents = {test.rank: threading.main_thread().ident}
    return tuple(
        RankState(rank, _stack(traceback.extract_stack(frames[ident])), "" if test.threads else collective())
        for rank, ident in idents.items()
        if ident in frames
    )


def _stack(frames: traceback.StackSummary) -> str:
    """Formats the frames that are the test's: those that pytest's own code called last."""
    of_runner = [number for number, frame in enumerate(frames) if frame.filename.startswith(RUNNERS)]
    return "".join(traceback.format_list(frames[max(of_runner, default=-1) + 1 :] or frames))


def collective() -> str:
    """Returns the collective that this rank has entered and not left, as torch's flight recorder has it; '' for none.

    Shapes are those of the inputs.
    """
    waiting = [entry for entry in flight_recorder.read() if not entry.retired] if dist.is_initialized() else []
    if not waiting:
        return ""
    entry = waiting[-1]
    shapes = [[*size] for size in entry.input_sizes]
    return f"{entry.profiling_name} #{entry.collective_seq_id}, shapes {shapes}"
