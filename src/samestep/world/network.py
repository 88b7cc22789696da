"""Which network interface leads to another machine, and what a machine's own addresses are."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

import psutil

from samestep.errors import UserError

POD_NAMES_S = 120.0
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def addresses(host: str) -> list[str]:
    """The addresses that `host` resolves to. Raises UserError when it resolves to none.

    In Kubernetes it waits: a pod's name is known some seconds after the pod has started.
    """
    until = time.monotonic() + (POD_NAMES_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0)
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except (OSError, UnicodeError):  # what is no name at all is a UnicodeError
            if time.monotonic() >= until:
                raise UserError(
                    f"the name {host} is unknown on {socket.gethostname()}; give an address, as in "
                    "--master-addr 10.0.0.1"
                ) from None
        time.sleep(1.0)


def interfaces() -> dict[str, list[str]]:
    """This machine's interfaces and their addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in entries if a.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def is_here(host: str) -> bool:
    """Whether `host` is this machine."""
    mine = {address for entries in interfaces().values() for address in entries}
    return any(ipaddress.ip_address(a).is_loopback or a in mine for a in addresses(host))


def towards(host: str) -> tuple[str, str] | None:
    """(interface, its address) that the way to `host` leaves by; None when there is no way. Sends nothing."""
    for address in addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            mine = probe.getsockname()[0]
        for name, entries in interfaces().items():
            if mine in entries:
                return name, mine
    return None


def choose(env: MutableMapping[str, str], meeting: str) -> str | None:
    """Tells gloo and NCCL which interface to use, the one towards `meeting`; returns a sentence that says so.

    What the user has set stays. None where nothing is to be said: all is set, or all ranks are on this machine.
    """
    if NAMES[0] in env or (os.name != "posix"):
        return None
    found = towards(meeting)
    if found is None:
        return None
    name, address = found
    env[NAMES[0]] = name
    if ipaddress.ip_address(address).is_loopback:
        return None  # NCCL finds its own way inside one machine
    env.setdefault(NAMES[1], name)
    return f"gloo and NCCL use the interface {name}, which leads to {meeting}; --interface chooses another"


def bound(host: str, port: int) -> socket.socket:
    """A listening socket at `host` alone, and not at the machine's other addresses."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(address)
    listening.listen(4096)
    return listening


def check_interface(name: str) -> Mapping[str, str]:
    """The environment that makes gloo and NCCL use interface `name`. Raises UserError when there is none such here."""
    known = interfaces()
    if name not in known:
        raise UserError(f"--interface {name}: this machine has {', '.join(known)}; name one of them")
    return dict.fromkeys(NAMES, name)


def check_master(master: str, machines: int) -> None:
    """Raises UserError when the other machines could not reach `master` by the address that it has here."""
    if machines < 2:
        return
    found = addresses(master)
    if any(ipaddress.ip_address(a).is_unspecified for a in found):
        raise UserError(f"--master-addr {master} names no machine; give the address by which the others reach it")
    loops = [a for a in found if ipaddress.ip_address(a).is_loopback]
    if loops:
        outside = [a for entries in interfaces().values() for a in entries if not ipaddress.ip_address(a).is_loopback]
        shown = next((a for a in outside if not ipaddress.ip_address(a).is_link_local), "ADDRESS")
        raise UserError(
            f"{master} is {loops[0]} on {socket.gethostname()}, an address that no other machine can reach (see its "
            f"line in /etc/hosts); give one that they can, as in --master-addr {shown}"
        )
