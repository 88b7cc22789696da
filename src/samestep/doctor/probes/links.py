"""Probes of the links between the machines: random ports that the ranks will use, and the speed of each direction."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from samestep.doctor.machine import Flow, LaunchInfo, Machine
from samestep.doctor.probe import Finding, FleetProbe, fail, ok, quoted, warn
from samestep.message import Message, as_said, message
from samestep.world.network import Dialled

SECONDS = 1.25
MOST_PAIRS = 12  # of more machines, each sends to the next one alone
SLOW = 800.0  # Mbit/s: below a gigabit Ethernet, which carries 940
LOPSIDED = 2.0
GRADIENT_MBIT = 25e6 * 32 / 1e6  # of a model of 25 million parameters
Pair = tuple[str, str]  # source, target


@dataclass(frozen=True)
class Attempt:
    """A connection from a machine to a random port of another, or of itself."""

    source: str
    target: str
    address: str
    port: int
    dialled: Dialled


@dataclass(frozen=True)
class Reachability:
    """Whether each machine reaches a random port of each other one: ranks use ports that the kernel chooses."""

    attempts: tuple[Attempt, ...]


def try_ports(machines: Sequence[Machine], info: LaunchInfo) -> Reachability:
    ports = {machine.name: machine.listen() for machine in machines}

    def dial(source: Machine) -> list[Attempt]:
        attempts = []
        for target in machines:
            if target is not source or len(machines) == 1:
                address, port = target.address, ports[target.name]
                dialled = source.dial(address, port)
                attempts.append(Attempt(source.name, target.name, address, port=port, dialled=dialled))
        return attempts

    with ThreadPoolExecutor(len(machines)) as pool:
        return Reachability(tuple(attempt for attempts in pool.map(dial, machines) for attempt in attempts))


def judge_reachability(reachability: Reachability) -> list[Finding]:
    failed = [attempt for attempt in reachability.attempts if attempt.dialled.outcome != "open"]
    blocked = {(attempt.source, attempt.target) for attempt in failed}
    findings = list[Finding]()
    for attempt in failed:
        findings += _judge_attempt(attempt, reaches_back=(attempt.target, attempt.source) not in blocked)
    slowest = max((attempt.dialled.seconds for attempt in reachability.attempts), default=0.0)
    count = len(reachability.attempts)
    return findings or ok(message("random_ports_are_reached", connections=count, milliseconds=1000 * slowest))


def _judge_attempt(attempt: Attempt, *, reaches_back: bool) -> list[Finding]:
    source, target, address = attempt.source, attempt.target, attempt.address
    fields = {"source": source, "target": target, "address": address, "port": attempt.port}
    fields["back"] = message("machine_reaches_back", source=target, target=source) if reaches_back else None
    match attempt.dialled.outcome:
        case "refused":
            why = message("machine_refuses_connections", **fields)
            fix = f"sysctl net.ipv4.ip_local_port_range   # on {target}: open these ports between the machines"
        case "dropped":
            why = message("machine_does_not_answer", **fields)
            rule = f"iptables -I INPUT -s {quoted(source)} -j ACCEPT"
            fix = f"{rule}   # on {target}; ranks use ports that the kernel chooses"
        case "no route":
            why, fix = message("no_route_to_machine", **fields), f"ip route get {quoted(address)}   # on {source}"
        case "unknown name":
            why, fix = message("machine_has_unknown_name", **fields), f"getent hosts {quoted(address)}   # on {source}"
        case _:
            why, fix = message("connection_to_machine_failed", **fields), f"ping {quoted(address)}   # on {source}"
    return fail(why, fix)


@dataclass(frozen=True)
class Stream:
    source: str
    target: str
    flow: Flow


@dataclass(frozen=True)
class Links:
    """The speed of the links between the machines, measured in both directions, one after the other."""

    streams: tuple[Stream, ...]


def measure_links(machines: Sequence[Machine], info: LaunchInfo) -> Links:
    pairs = [(source, target) for source in machines for target in machines if source is not target]
    if len(pairs) > MOST_PAIRS:
        pairs = [(machine, machines[(number + 1) % len(machines)]) for number, machine in enumerate(machines)]
    ports = {machine.name: machine.listen() for machine in machines} if pairs else {}
    streams = []
    for source, target in pairs:
        flow = source.send(target.address, ports[target.name], SECONDS)
        streams.append(Stream(source.name, target.name, flow))
    return Links(tuple(streams))


def judge_links(links: Links) -> list[Finding]:
    if not links.streams:
        return ok(message("one_machine_has_no_link"))
    findings = list[Finding]()
    for stream in links.streams:
        source, target = stream.source, stream.target
        if stream.flow.failure:
            fix = f"ip link set dev INTERFACE mtu 1500   # on {source} and {target}; ethtool -S INTERFACE"
            reason = _reason(stream.flow)
            findings += fail(message("stream_does_not_arrive", source=source, target=target, why=reason), fix)
    rates = {(stream.source, stream.target): stream.flow.mbit_s for stream in links.streams if not stream.flow.failure}
    findings += _judge_slow(rates)
    already_reported = {frozenset(pair) for pair in rates if rates[pair] < SLOW}
    for (source, target), rate in rates.items():
        back = rates.get((target, source))
        if back is not None and rate * LOPSIDED < back and frozenset((source, target)) not in already_reported:
            why = message("link_is_slower_one_way", source=source, target=target, mbit_s=rate, back_mbit_s=back)
            findings += warn(why, f"ethtool -S INTERFACE   # on {source} and {target}: errors, duplex")
    return findings or ok(message("links_are_fast", mbit_s=min(rates.values())))


def _reason(flow: Flow) -> Message:
    match flow.failure:
        case "another program":
            return message("stream_meets_another_program")
        case "stopped":
            return message("stream_stopped", bytes=flow.received)
        case "miscounted":
            return message("stream_is_miscounted")
        case _:
            return as_said(flow.detail)


def _judge_slow(rates: Mapping[Pair, float]) -> list[Finding]:
    """Names the slow links; where all links of one machine are slow and others are not, that machine."""
    slow = {pair for pair, rate in rates.items() if rate < SLOW}
    fix = "ethtool INTERFACE | grep -i speed   # on {}; another --interface or --master-addr may be faster"
    findings = list[Finding]()
    for side in (0, 1):
        for name in sorted({pair[side] for pair in slow}):
            pairs = [pair for pair in rates if pair[side] == name]
            if len(pairs) > 1 and slow.issuperset(pairs) and any(name not in pair for pair in rates.keys() - slow):
                rate = statistics.median(rates[pair] for pair in pairs)
                fields = {"machine": name, "mbit_s": rate, "seconds": _all_reduce_s(rate)}
                why = message("machine_receives_slowly" if side else "machine_sends_slowly", **fields)
                findings += warn(why, fix.format(name), machine=name)
                slow -= set(pairs)
    for source, target in sorted(slow):
        if (target, source) in slow and target < source:
            continue  # said with the other direction
        rate, back = rates[source, target], rates.get((target, source))
        fields = {"source": source, "target": target, "mbit_s": rate, "back_mbit_s": back}
        findings += warn(message("link_is_slow", **fields, seconds=_all_reduce_s(rate)), fix.format("both"))
    return findings


def _all_reduce_s(rate: float) -> float:
    """Returns what an all-reduce of a model of 25 million parameters would take at least."""
    return GRADIENT_MBIT / max(rate, 1e-3)


PROBES = (
    FleetProbe(name="reachability", group="network", facts=Reachability, gather=try_ports, judge=judge_reachability),
    FleetProbe(name="links", group="network", facts=Links, gather=measure_links, judge=judge_links),
)
