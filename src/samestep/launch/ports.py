"""Checks that the rendezvous port is free, and finds a free one."""

from __future__ import annotations

import errno
import socket

from samestep.errors import UserError
from samestep.launch import Machines
from samestep.world import network


def check(machines: Machines) -> None:
    """Raises UserError when the rendezvous port is on this machine and is in use."""
    if not machines.port or not network.is_this_machine(machines.master):
        return
    if error := network.bind_error(machines.master, machines.port):
        taken = error.errno == errno.EADDRINUSE
        why = (
            network.port_taken(machines.port) if taken else f"port {machines.port} cannot be opened ({error.strerror})"
        )
        other = "the same other one on each machine" if machines.nnodes > 1 else "another, or --port 0 for any"
        raise UserError(f"{why}; choose {other}")


def any_free(host: str) -> int:
    """Returns a port that is free now at `host`, an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
