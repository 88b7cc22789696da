"""This rank's collectives, from torch's flight recorder: for itself, and for the parent while the rank hangs.

torch records the collectives of each process group in a ring. What reads it is private to torch: where a version lacks
it, the parent has the stacks and phases alone. torch's own server of it is not used: in a forked child it shuts the
rank's socket, and it ends a process in which no thread can be started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from samestep.rank.hooks import Hooks
from samestep.records.flight_recorder import Entry, entries_of
from samestep.world import questions

ENTRIES = 256  # entries of the ring buffer: more than the collectives of a step that are in flight


def enable(entries: int = ENTRIES) -> None:
    """Makes torch record collectives. Call it before the process group is opened. entries: that it keeps at most."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def read() -> tuple[Entry, ...]:
    """Returns the collectives of this rank that torch has kept, the oldest first; none where it records none."""
    dump = _dump()
    try:
        return entries_of(dump()) if dump else ()
    except ValueError:
        return ()


def serve(folder: Path, rank: int) -> None:
    """Answers the command's questions for this rank's collectives and stacks: see world/questions.py."""
    dump = _dump()
    questions.serve(folder, rank, {questions.COLLECTIVES: dump} if dump else {})


def end() -> None:
    """Answers no more."""
    questions.end()


def serve_with_group(hooks: Hooks, folder: Path, rank: int) -> None:
    """Serves from the first process group on, which has threads of its own: a script without one has none of ours."""

    def new_init(init: Any, *args: Any, **kwargs: Any) -> Any:
        serve(folder, rank)
        return init(*args, **kwargs)

    # The module whose functions a script may have imported.
    hooks.attach(dist, "init_process_group", new_init, sys.modules["torch.distributed.distributed_c10d"])


def _dump() -> Callable[[], bytes] | None:
    return getattr(c10d, "_dump_fr_trace_json", None)
