"""This machine's addresses, the interface on the route to another machine, and where the ranks of a launch meet."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import subprocess
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from samestep.errors import UserError, say
from samestep.message import Message, message

NAMES_S = 120.0
SAY_S = 5.0  # after so long it says what it waits for
# Environment variables of places where a machine's name may become known only some time after the machine has started.
CLUSTERS = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID")
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
DIAL_S = 2.0
Outcome = Literal["open", "refused", "dropped", "no route", "unknown name", "error"]
OUTCOMES: dict[int, Outcome] = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "dropped"}
OUTCOMES |= {errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route", errno.EACCES: "refused"}


def addresses(host: str, wait_s: float = NAMES_S) -> list[str]:
    """Resolves `host` to its addresses. Raises UserError when it has none.

    In Kubernetes and Slurm it waits for at most `wait_s`: the name of a pod, or of a machine that is switched on for a
    job, resolves only some seconds after that has started. Elsewhere a name that is unknown is mistyped.
    """
    began, said = time.monotonic(), False
    waits_s = wait_s if any(name in os.environ for name in CLUSTERS) else 0.0
    while True:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except (OSError, UnicodeError) as error:
            waited_s = time.monotonic() - began
            if waited_s >= waits_s or isinstance(error, UnicodeError):  # which no name can be
                waited = waited_s if waits_s and not isinstance(error, UnicodeError) else None
                machine = socket.gethostname()
                raise UserError(message("name_is_unknown", name=host, machine=machine, waited_s=waited)) from None
            if waited_s >= SAY_S and not said:
                said = True
                say(message("name_is_waited_for", name=host, seconds=waits_s))
        time.sleep(min(1.0, max(0.05, waits_s - waited_s)))


def interfaces() -> dict[str, list[str]]:
    """Returns this machine's interfaces: name -> addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in entries if a.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def is_this_machine(host: str, wait_s: float = NAMES_S) -> bool:
    """Whether `host` is this machine. wait_s: as for `addresses`."""
    local = {address for entries in interfaces().values() for address in entries}
    return any(ipaddress.ip_address(a).is_loopback or a in local for a in addresses(host, wait_s))


def route_to_host(host: str) -> tuple[str, str] | None:
    """Returns (interface, its address) of the route to `host`; None where there is no route. Sends no packet."""
    for address in addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            source = probe.getsockname()[0]
        for name, entries in interfaces().items():
            if source in entries:
                return name, source
    return None


def route_to(host: str) -> tuple[str, str] | None:
    """Returns as `route_to_host`; None also for a name that is unknown here."""
    try:
        return route_to_host(host)
    except UserError:
        return None


def choose(env: MutableMapping[str, str], master: str) -> Message | None:
    """Sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in `env` to the interface on the route to the host `master`.

    Variables that the user has set stay. Returns a message about the choice; None where both are set already, or all
    ranks are on this machine.
    """
    if NAMES[0] in env or (os.name != "posix"):
        return None
    route = route_to_host(master)
    if route is None:
        return None
    name, address = route
    env[NAMES[0]] = name
    if ipaddress.ip_address(address).is_loopback:
        return None  # inside one machine NCCL needs no interface
    env.setdefault(NAMES[1], name)
    return message("interface_is_chosen", interface=name, master=master)


def bound(host: str, port: int) -> socket.socket:
    """Opens a listening socket at `host` only, not at the machine's other addresses."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(address)
    listening.listen(4096)
    return listening


def bind_error(host: str, port: int) -> OSError | None:
    """Returns why `port` cannot be opened at `host`, an address of this machine; None where it can."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None


def holder_of(port: int) -> tuple[int, str] | None:
    """Returns the pid and the name of the process that listens on a port; None where it is another user's."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return connection.pid, psutil.Process(connection.pid).name()
    return None


def port_taken(port: int) -> Message:
    """Returns who has a port, for an error."""
    if holder := holder_of(port):
        return message("port_is_taken_by_process", port=port, pid=holder[0], process=holder[1])
    return message("port_is_taken_by_another_user", port=port)


def check_loopback() -> None:
    """Raises UserError where the processes of this machine cannot reach each other. Sends no packet."""
    for name in filter(None, os.environ.get(NAMES[0], "").split(",")):
        if name not in (known := interfaces()):
            raise UserError(message("variable_names_no_interface", variable=NAMES[0], interface=name, known=[*known]))
    address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise UserError(message("loopback_is_down", address=address, error=error.strerror)) from None


def check_interface(name: str, *, several: bool = False) -> Mapping[str, str]:
    """Returns the variables that make gloo and NCCL use interface `name`. several: whether there are other machines.

    Raises UserError for an unknown interface, or one that leads to no other machine.
    """
    known = interfaces()
    if name not in known:
        raise UserError(message("option_names_no_interface", interface=name, known=[*known]))
    if several and is_loop(name):
        usable = [interface for interface in known if not is_loop(interface)]
        raise UserError(message("option_names_an_interface_of_this_machine", interface=name, usable=usable))
    return dict.fromkeys(NAMES, name)


def is_loopback(address: str) -> bool:
    """Whether an address leads to this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def is_loop(interface: str) -> bool:
    """Whether an interface has addresses, and leads to this machine alone."""
    entries = interfaces().get(interface, [])
    return bool(entries) and all(ipaddress.ip_address(address).is_loopback for address in entries)


def check_chosen(env: Mapping[str, str], master: str) -> None:
    """Raises UserError where GLOO_SOCKET_IFNAME leads to no other machine, for a rank that `master` must reach."""
    name = env.get(NAMES[0], "")
    if is_loop(name) and not any(ipaddress.ip_address(address).is_loopback for address in addresses(master)):
        fields = {"variable": NAMES[0], "interface": name, "master": master}
        raise UserError(message("variable_names_an_interface_of_this_machine", **fields))


def check_master(master: str, machines: int, wait_s: float = NAMES_S) -> None:
    """Raises UserError when `master` resolves on this machine to an address that the other machines cannot reach.

    wait_s: as for `addresses`.
    """
    if machines < 2:
        return
    resolved = addresses(master, wait_s)
    if any(ipaddress.ip_address(a).is_unspecified for a in resolved):
        raise UserError(message("master_addr_names_no_machine", master=master))
    loops = [a for a in resolved if ipaddress.ip_address(a).is_loopback]
    if loops:
        outside = [a for entries in interfaces().values() for a in entries if not ipaddress.ip_address(a).is_loopback]
        example = next((a for a in outside if not ipaddress.ip_address(a).is_link_local), "ADDRESS")
        fields = {"master": master, "address": loops[0], "machine": socket.gethostname(), "example": example}
        raise UserError(message("master_is_reached_by_no_other", **fields))


SLURM_FIRST_PORT, SLURM_PORTS = 20000, 10000  # those that jobs use
INTERACTIVE_STEP = 2**31  # Slurm gives the steps of salloc's shell and of batch scripts numbers from here on


def slurm_port(job_id: str, step_id: str = "0") -> int:
    """Returns a port derived from the numbers of a job and its step, so that two on one machine seldom share one."""
    step = int(step_id) if int(step_id) < INTERACTIVE_STEP else 0
    return SLURM_FIRST_PORT + (int(job_id) + 97 * step) % SLURM_PORTS


def first_slurm_host(env: Mapping[str, str]) -> str:
    """Returns the first machine of the Slurm job in `env`. Raises UserError when scontrol does not answer."""
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return listed.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        raise UserError(message("slurm_lists_no_machines", nodes=nodes)) from None


@dataclass(frozen=True)
class Dialled:
    """How a connection to a port ended. dropped: nothing answered in time, as behind a firewall that drops. seconds:
    until it was open, or until it failed."""

    outcome: Outcome
    seconds: float
    detail: str = ""


def dial(address: str, port: int, wait_s: float = DIAL_S) -> Dialled:
    """Opens a connection and closes it."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=wait_s):
            return Dialled("open", time.monotonic() - began)
    except socket.gaierror as error:
        return Dialled("unknown name", time.monotonic() - began, str(error))
    except TimeoutError:
        return Dialled("dropped", time.monotonic() - began, f"no answer within {wait_s:g} s")
    except OSError as error:
        return Dialled(OUTCOMES.get(error.errno or 0, "error"), time.monotonic() - began, error.strerror or str(error))
