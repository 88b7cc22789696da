"""Checks that the rendezvous port is free, and finds a free one."""

from __future__ import annotations

import socket

from samestep.errors import UserError
from samestep.launch import Machines
from samestep.world import network


def check(machines: Machines) -> None:
    """Raises UserError when the rendezvous port is on this machine and is in use."""
    if not machines.port or not network.is_this_machine(machines.master):
        return
    if network.bind_error(machines.master, machines.port):
        holder = network.holder_of(machines.port)
        by = f" by {holder}" if holder else ""
        raise UserError(f"port {machines.port} is taken{by}; choose another, or --port 0 for any")


def any_free(host: str) -> int:
    """Returns a port that is free now at `host`, an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
