"""This rank's collectives, from torch's flight recorder: for itself, and for the parent while the rank hangs.

torch records the collectives of each process group in a ring, and its worker server answers from a thread of its own
that needs no GIL. Both are private to torch: where a version lacks one, the parent has the stacks and phases alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch._C._distributed_c10d as c10d

from samestep.errors import UserError
from samestep.records.flight_recorder import Entry, entries_of, socket_of
from samestep.world.connections import make_private, short_path

ENTRIES = 256  # of the ring: more than the collectives of any step that are in flight
_servers: list[object] = []  # they end with the process


def enable(entries: int = ENTRIES) -> None:
    """Makes torch record collectives. Call it before the process group is opened. entries: that it keeps at most."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def read() -> tuple[Entry, ...]:
    """Returns the collectives of this rank that torch has kept, the oldest first; none where it records none."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    try:
        return entries_of(dump()) if dump else ()
    except ValueError:
        return ()


def serve(folder: Path, rank: int) -> None:
    """Answers at a Unix socket below `folder`, which must be on this machine's disk."""
    server = getattr(c10d, "_WorkerServer", None)
    if server is None or _servers:  # one a process: its threads end with it alone
        return
    path = socket_of(folder, rank)
    with suppress(OSError, RuntimeError, UserError):  # some file systems hold no sockets, or none for one user alone
        make_private(path.parent)
        path.unlink(missing_ok=True)
        with short_path(path) as name:
            _servers.append(server(name))
