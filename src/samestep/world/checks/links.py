"""The speed of the links between the machines, measured in both directions, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, ok
from samestep.world.machine import Flow, Machine

GROUP = "network"
SECONDS = 1.25
MOST_PAIRS = 12  # of more machines, each sends to the next one alone
SLOW = 800.0  # Mbit/s: below a gigabit Ethernet, which carries 940
LOPSIDED = 2.0


@dataclass(frozen=True)
class Stream:
    source: str
    target: str
    flow: Flow


@dataclass(frozen=True)
class Facts:
    streams: tuple[Stream, ...]


def measure(machines: Sequence[Machine], info: LaunchInfo) -> Facts:
    pairs = [(source, target) for source in machines for target in machines if source is not target]
    if len(pairs) > MOST_PAIRS:
        pairs = [(machine, machines[(n + 1) % len(machines)]) for n, machine in enumerate(machines)]
    ports = {machine.name: machine.listen() for machine in machines} if pairs else {}
    streams = []
    for source, target in pairs:
        flow = source.send(target.address, ports[target.name], SECONDS)
        streams.append(Stream(source.name, target.name, flow))
    return Facts(tuple(streams))


def judge(seen: Facts) -> list[Finding]:
    if not seen.streams:
        return ok("one machine, no link")
    findings = []
    for each in seen.streams:
        if each.flow.error:
            fix = f"ip link set dev INTERFACE mtu 1500   # on {each.source} and {each.target}; ethtool -S INTERFACE"
            said = f"a stream from {each.source} to {each.target} does not arrive: {each.flow.error}"
            findings.append(Finding("FAIL", said, fix))
    rates = {(each.source, each.target): each.flow.mbit_s for each in seen.streams if not each.flow.error}
    findings += _slow(rates)
    already_reported = {frozenset(pair) for pair in rates if rates[pair] < SLOW}
    for (source, target), rate in rates.items():
        back = rates.get((target, source))
        if back is not None and rate * LOPSIDED < back and frozenset((source, target)) not in already_reported:
            said = f"the link from {source} to {target} carries {_shown(rate)}, and {_shown(back)} back"
            findings.append(Finding("WARN", said, f"ethtool -S INTERFACE   # on {source} and {target}: errors, duplex"))
    return findings or ok(f"each link carries {_shown(min(rates.values()))} or more")


def _slow(rates: dict[tuple[str, str], float]) -> list[Finding]:
    """Names the slow links; where all links of one machine are slow and others are not, that machine."""
    slow = {pair for pair, rate in rates.items() if rate < SLOW}
    fix = "ethtool INTERFACE | grep -i speed   # on both; another --interface or --master-addr may be faster"
    findings = []
    for side, way in ((0, "to the others"), (1, "from the others")):
        for name in sorted({pair[side] for pair in slow}):
            its = [pair for pair in rates if pair[side] == name]
            if len(its) > 1 and slow.issuperset(its) and any(name not in pair for pair in rates.keys() - slow):
                rate = statistics.median(rates[pair] for pair in its)
                said = f"the link of {name} is slow: {_shown(rate)} {way}{_cost(rate)}"
                findings.append(Finding("WARN", said, fix.replace("both", name), name))
                slow -= set(its)
    for source, target in sorted(slow):
        rate = rates[source, target]
        back = rates.get((target, source))
        if (target, source) in slow and target < source:
            continue  # said with the other direction
        also = f", and {_shown(back)} back" if back is not None else ""
        said = f"the link from {source} to {target} is slow: {_shown(rate)}{also}{_cost(rate)}"
        findings.append(Finding("WARN", said, fix))
    return findings


def _shown(rate: float) -> str:
    return f"{rate / 1000:.1f} Gbit/s" if rate >= 1000 else f"{rate:.0f} Mbit/s"


def _cost(rate: float) -> str:
    """Returns what an all-reduce of a model of 25 million parameters would take at least."""
    return f"; the gradients of 25 million parameters take {25e6 * 32 / 1e6 / max(rate, 1e-3):.1f} s a step"
