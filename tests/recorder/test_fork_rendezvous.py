"""The ranks of a forked script meet at a port that is held from the moment when it is chosen."""

from __future__ import annotations

import os
import socket

import pytest
from torch.distributed import TCPStore

from samestep.recorder import fork_rendezvous


def test_nobody_can_take_the_port_before_the_store_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    descriptor = fork_rendezvous.listen()
    port = int(os.environ["MASTER_PORT"])
    with pytest.raises(OSError, match="in use"):
        socket.create_server((os.environ["MASTER_ADDR"], port))
    fork_rendezvous.serve(descriptor, 0)
    TCPStore("127.0.0.1", port, is_master=False).set("from", "a rank")
    assert TCPStore("127.0.0.1", port, is_master=False).get("from") == b"a rank"
