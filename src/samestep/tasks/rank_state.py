"""What the ranks of this process are doing: their Python stacks, and the collective that they wait in."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import _pytest
import pluggy
import torch.distributed as dist

from samestep.rank import flight_recorder
from samestep.records.rank_tests import RankState, RunTest
from samestep.tasks.thread_ranks import THREAD

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
