"""Whether each machine reaches a random port of each other one: ranks communicate on ports that the kernel chooses."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, ok
from samestep.world.machine import Dialled, Machine, Outcome

GROUP = "network"


@dataclass(frozen=True)
class Attempt:
    """A connection from a machine to a random port of another, or of itself."""

    source: str
    target: str
    address: str
    port: int
    dialled: Dialled


@dataclass(frozen=True)
class Facts:
    attempts: tuple[Attempt, ...]


def measure(machines: Sequence[Machine], info: LaunchInfo) -> Facts:
    ports = {machine.name: machine.listen() for machine in machines}

    def dial(source: Machine) -> list[Attempt]:
        targets = [each for each in machines if each is not source or len(machines) == 1]
        attempts = []
        for each in targets:
            port = ports[each.name]
            attempts.append(Attempt(source.name, each.name, each.address, port, source.dial(each.address, port)))
        return attempts

    with ThreadPoolExecutor(len(machines)) as pool:
        return Facts(tuple(attempt for attempts in pool.map(dial, machines) for attempt in attempts))


def judge(seen: Facts) -> list[Finding]:
    wrong = [each for each in seen.attempts if each.dialled.outcome != "open"]
    findings = []
    blocked = {(each.source, each.target) for each in wrong}
    for each in wrong:
        back = "" if (each.target, each.source) in blocked else f"; {each.target} reaches {each.source}"
        why, fix = WHY[each.dialled.outcome]
        findings.append(
            Finding(
                "FAIL",
                f"{each.source} does not reach port {each.port} of {each.target} ({each.address}): {why}{back}",
                fix.format(source=each.source, target=each.target, address=each.address),
            )
        )
    slowest = max((each.dialled.seconds for each in seen.attempts), default=0.0)
    return findings or ok(f"{len(seen.attempts)} connections to random ports, each within {1000 * slowest:.1f} ms")


WHY: dict[Outcome, tuple[str, str]] = {
    "refused": (
        "refused, though it listens: a firewall rejects it",
        "sysctl net.ipv4.ip_local_port_range   # on {target}: open these ports between the machines",
    ),
    "dropped": (
        "nothing answers: a firewall drops it, or a link is cut",
        "iptables -I INPUT -s {source} -j ACCEPT   # on {target}; ranks use ports that the kernel chooses",
    ),
    "no route": (
        "there is no route: a link is cut, or the network is another",
        "ip route get {address}   # on {source}",
    ),
    "unknown name": ("the name is unknown", "getent hosts {address}   # on {source}"),
    "error": ("the connection failed", "ping {address}   # on {source}"),
}
