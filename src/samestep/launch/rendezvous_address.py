"""The address where ranks meet: its port and its init_method, and a second machine that takes the master's number."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from samestep.errors import TrainingFailed, UserError
from samestep.launch import Machines
from samestep.message import message
from samestep.world import RankVariables, network
from samestep.world.imports import module_arguments
from samestep.world.network import dial
from samestep.world.processes import die_with_parent, wait_for


def check_port(machines: Machines) -> None:
    """Raises UserError when the rendezvous port is on this machine and is in use."""
    if not machines.port or not network.is_this_machine(machines.master):
        return
    if error := network.bind_error(machines.master, machines.port):
        taken = error.errno == errno.EADDRINUSE
        why = message("port_cannot_be_opened", port=machines.port, error=error.strerror)
        why = network.port_taken(machines.port) if taken else why
        raise UserError(message("port_of_machines_is_taken" if machines.nnodes > 1 else "port_is_taken", why=why))


def free_port(host: str) -> int:
    """Returns a port that is free now at `host`, an address of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def tcp_init_method(host: str, port: str | int) -> str:
    """Returns 'tcp://host:port', with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def rendezvous_of(init_method: str, env: Mapping[str, str]) -> tuple[str, int]:
    """Returns (host, port) of an init_method: 'tcp://host:port', or of MASTER_ADDR and MASTER_PORT for others."""
    url = urlsplit(init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        return url.hostname, url.port
    return env["MASTER_ADDR"], int(env["MASTER_PORT"])


def user_init_method(launcher: str, env: Mapping[str, str], names: RankVariables, example: str) -> str:
    """Returns the init_method of MASTER_ADDR and MASTER_PORT; '' where all ranks are on one machine, which use a file.

    Raises UserError where the ranks are on several machines and the two variables are not set.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return tcp_init_method(env["MASTER_ADDR"], env["MASTER_PORT"])
    if int(env[names.local_size]) == int(env[names.size]):
        return ""
    raise UserError(
        f"{launcher} sets no rendezvous address for ranks on several machines; name rank 0's machine, as in {example}"
    )


MOST_S = 30.0  # that machine's command may have been typed a moment later, and imports torch first
POLL_S = 0.2
DIAL_S = 2.0


def report_second_master(master: str, port: int, nnodes: int, timeout_s: float) -> bool:
    """Joins the rendezvous at `master` as machine 0 again, so that its command fails and names the duplicate number.

    Waits until that command listens, for at most 30 s. Returns whether it was reached.
    """
    until = time.monotonic() + min(timeout_s, MOST_S)
    while dial(master, port, DIAL_S).outcome != "open":
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    joining = subprocess.Popen(
        [sys.executable, *module_arguments("samestep.rank.rendezvous"), master, str(port), str(nnodes)],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        what = message("mistake_is_being_reported", master=master)
        return wait_for(joining, what, deadline_s=timeout_s + MOST_S) == 0
    except TrainingFailed:
        return False
