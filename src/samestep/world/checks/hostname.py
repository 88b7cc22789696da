"""This machine's name: where GLOO_SOCKET_IFNAME is not set, gloo listens on the address that the name has."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world import network
from samestep.world.checks import Finding, LaunchInfo, ok, on_each, warn

GROUP = "host"


@dataclass(frozen=True)
class Facts:
    """The name and the addresses of one machine.

    addresses: of the name; empty: unknown. mine: all addresses of this machine. chosen: GLOO_SOCKET_IFNAME. route: the
    interface towards the master; '' without one.
    """

    name: str
    addresses: tuple[str, ...]
    mine: tuple[str, ...]
    chosen: str
    route: str
    nnodes: int


def probe(info: LaunchInfo) -> Facts:
    name = socket.gethostname()
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        addresses = []
    mine = [address for entries in network.interfaces().values() for address in entries]
    route = network.route_to(info.master)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return Facts(name, tuple(dict.fromkeys(addresses)), tuple(mine), chosen, route[0] if route else "", info.nnodes)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    route = "" if seen.route == "lo" and seen.nnodes > 1 else seen.route  # the master's name may be this machine's own
    export = f"export GLOO_SOCKET_IFNAME={route or ('lo' if seen.nnodes == 1 else 'eth0')}"
    scripts = "samestep run sets GLOO_SOCKET_IFNAME itself; a script under torchrun does not"
    shown = f"{seen.name} is {', '.join(seen.addresses) or 'unknown'} on this machine"
    if seen.chosen:
        return ok(f"{shown}; gloo uses GLOO_SOCKET_IFNAME={seen.chosen} instead")
    if not seen.addresses:
        return warn(f"the name {seen.name} is unknown on this machine itself, and gloo looks it up; {scripts}", export)
    local = [address for address in seen.addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if seen.nnodes > 1 and local:
        return warn(f"{shown}, where no other machine reaches it (a line in /etc/hosts); {scripts}", export)
    foreign = [address for address in seen.addresses if address not in seen.mine and address not in local]
    if len(foreign) == len(seen.addresses):
        return warn(f"{shown}, which is none of its addresses: gloo cannot listen there; {scripts}", export)
    return ok(shown)
