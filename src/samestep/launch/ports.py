"""Checks that the rendezvous port is free, and finds a free one."""

from __future__ import annotations

import socket

import psutil

from samestep.errors import UserError
from samestep.launch import Machines
from samestep.world import network


def check(machines: Machines) -> None:
    """Raises UserError when the rendezvous port is on this machine and is in use."""
    if not machines.port or not network.is_this_machine(machines.master):
        return
    family, _, _, _, address = socket.getaddrinfo(machines.master, machines.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            raise UserError(
                f"port {machines.port} is taken{_holder(machines.port)}; choose another, or --port 0 for any"
            ) from None


def _holder(port: int) -> str:
    """Returns ' by process PID (NAME)' for the process that listens on a port; '' where it is another user's."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def any_free(host: str) -> int:
    """Returns a port that is free now at `host`, an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
