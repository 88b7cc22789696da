"""The largest packet (MTU) of the interface towards the master: where machines differ, large packets may be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from samestep.world import network
from samestep.world.checks import Finding, LaunchInfo, different, ok, warn

GROUP = "network"
SMALLEST = 1280  # IPv6's; an Ethernet has 1500


@dataclass(frozen=True)
class Facts:
    """The largest packet of one machine. interface: towards the master; '' without a route. mtu: bytes; 0: unknown."""

    interface: str
    mtu: int


def probe(info: LaunchInfo) -> Facts:
    route = network.route_to(info.master)
    state = psutil.net_if_stats().get(route[0]) if route else None
    return Facts(route[0], state.mtu) if route and state else Facts("", 0)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    known = {name: seen for name, seen in facts.items() if seen.mtu}
    findings: list[Finding] = []
    least = min((seen.mtu for seen in known.values()), default=0)
    if says := different(known, lambda seen: str(seen.mtu)):
        largest = max(known.values(), key=lambda seen: seen.mtu)
        findings += warn(
            f"the MTU is not the same on all machines ({says}): a switch drops packets that are too large, and a "
            "training stops at its first large message",
            f"ip link set {largest.interface} mtu {least}   # where it is larger",
        )
    for name, seen in known.items():
        if seen.mtu < SMALLEST:
            fix = f"ip link set {seen.interface} mtu 1500"
            findings.append(Finding("WARN", f"{seen.interface} takes packets of {seen.mtu} bytes: slow", fix, name))
    return findings or ok(f"packets of {least} bytes" if least else "no route, so no MTU")
