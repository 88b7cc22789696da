"""The master's name, and whether this machine reaches the rendezvous there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError
from samestep.world import network
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each
from samestep.world.machine import Dialled

GROUP = "launch"


@dataclass(frozen=True)
class Facts:
    """How one machine sees the master.

    addresses: of the master; empty: the name is unknown here. connect_error: how the last attempt to connect to the
    rendezvous ended, where the machines have not met; None where they have, or where this machine is the master.
    """

    host: str
    master: str
    port: int
    nnodes: int
    addresses: tuple[str, ...]
    connect_error: Dialled | None


def probe(info: LaunchInfo) -> Facts:
    try:
        addresses = tuple(network.addresses(info.master))
    except UserError:
        addresses = ()
    return Facts(socket.gethostname(), info.master, info.port, info.nnodes, addresses, info.connect_error)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    at = f"{seen.master}:{seen.port}"
    if not seen.addresses:
        return fail(
            f"the name {seen.master} is unknown on {seen.host}",
            f"echo 'ADDRESS {seen.master}' >> /etc/hosts   # or: --master-addr ADDRESS",
        )
    if seen.nnodes > 1 and all(ipaddress.ip_address(each).is_loopback for each in seen.addresses):
        return fail(
            f"{seen.master} is {seen.addresses[0]} on {seen.host}, where no other machine reaches it (a line in "
            "/etc/hosts)",
            "--master-addr ADDRESS   # the one by which the others reach it: hostname -I",
        )
    if seen.connect_error is None or seen.connect_error.outcome == "open":
        said = f"{seen.master} is {', '.join(seen.addresses)}"
        return ok(said) if seen.connect_error is None else fail(*_silent(at))
    why, fix = WHY[seen.connect_error.outcome]
    return fail(f"{at} is not reached: {why}", fix.format(port=seen.port, master=seen.master))


def _silent(at: str) -> tuple[str, str]:
    return (
        f"{at} is open, and no doctor answers there: another program has this port, or a doctor of another version",
        "# another --port, the same on each machine; the same samestep on each",
    )


WHY = {
    "refused": (
        "the connection is refused: the machine is there and nothing listens on the port, or a firewall rejects it",
        "ss -ltn | grep :{port}   # on {master}: start the same line there first; else open the port in its firewall",
    ),
    "dropped": (
        "nothing answers: a firewall drops the packets, the cable is out, or the address is another machine's",
        "iptables -I INPUT -p tcp --dport {port} -j ACCEPT   # on {master}; ping {master} from here",
    ),
    "no route": (
        "there is no route to it: another network, or the machine is off",
        "ip route get {master}   # then --master-addr with an address of a network that both have",
    ),
    "unknown name": ("its name is unknown", "# give an address: --master-addr 10.0.0.1"),
    "error": ("the connection failed", "ping {master}"),
}
