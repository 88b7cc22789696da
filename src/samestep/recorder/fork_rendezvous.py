"""The rendezvous of a script's forked ranks: a store that listens before they start, as torchrun's does."""

from __future__ import annotations

import os

from torch._C._distributed_c10d import TCPStore

from samestep.world.network import bound

HOST = "127.0.0.1"
_stores: list[TCPStore] = []  # stores, which live as long as this process


def listen() -> int:
    """Opens a free port in the process that will fork the ranks, and sets MASTER_ADDR and MASTER_PORT for them.

    Returns the socket's descriptor. It stays open until rank 0 serves the store: no other process can take the port.
    """
    listening = bound(HOST, 0)
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(listening.getsockname()[1])}
    # The first makes init_process_group connect to this store; the second tells libraries that a launcher has run.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "samestep"}
    return listening.detach()


def serve(descriptor: int, rank: int) -> None:
    """Serves the store in rank 0's process; in the others, closes the inherited socket."""
    if rank:
        os.close(descriptor)
        return
    port = int(os.environ["MASTER_PORT"])
    _stores.append(TCPStore(HOST, port, None, True, wait_for_workers=False, master_listen_fd=descriptor))
