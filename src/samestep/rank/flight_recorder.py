"""This rank's collectives, from torch's flight recorder: for itself, and for the parent while the rank hangs.

torch records the collectives of each process group in a ring, and its worker server answers from a thread of its own
that needs no GIL. Both are private to torch: where a version lacks one, the parent has the stacks and phases alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch._C._distributed_c10d as c10d

from samestep.records.flight_recorder import Entry, entries_of

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
    """Answers at the Unix socket collectives-rankR in `folder`, which must be on this machine's disk."""
    server = getattr(c10d, "_WorkerServer", None)
    if server is None or _servers:  # one a process: its threads end with it alone
        return
    path = folder / f"collectives-rank{rank}"
    with suppress(OSError, RuntimeError):  # some file systems hold no sockets
        path.unlink(missing_ok=True)
        directory = os.open(folder, os.O_RDONLY)
        try:
            # Through the folder's descriptor: a socket's path may have 107 characters at most.
            _servers.append(server(f"/proc/self/fd/{directory}/{path.name}"))
        finally:
            os.close(directory)
