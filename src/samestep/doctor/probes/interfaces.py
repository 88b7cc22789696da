"""Probes of the network interfaces: which leads to the master, what gloo and NCCL use, their packets, InfiniBand."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, MachineProbe, differences, fail, for_each, ok, quoted, warn
from samestep.message import message
from samestep.world import network, nvidia

VIRTUAL = tuple(
    ["docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "kube", "vmnet", "vboxnet", "podman", "lxc", "lxd"]
)
SMALLEST_MTU = 1280  # IPv6's; an Ethernet has 1500
ADAPTERS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int

    @property
    def is_loop(self) -> bool:
        return bool(self.addresses) and all(ipaddress.ip_address(address).is_loopback for address in self.addresses)

    @property
    def is_virtual(self) -> bool:
        """Whether it leads to containers of this machine alone, by its name."""
        return self.name.startswith(VIRTUAL)


@dataclass(frozen=True)
class Interfaces:
    """The network interfaces of one machine.

    route: the interface towards the master; '' without a route. gloo, nccl: what GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME say. gpus: whether NCCL is used.
    """

    interfaces: tuple[Interface, ...]
    route: str
    master: str
    nnodes: int
    gloo: str
    nccl: str
    gpus: bool

    @property
    def several(self) -> bool:
        return self.nnodes > 1

    @property
    def names(self) -> list[str]:
        """The interfaces that have an address."""
        return [interface.name for interface in self.interfaces if interface.addresses]


def read_interfaces(info: LaunchInfo) -> Interfaces:
    states, addresses = psutil.net_if_stats(), network.interfaces()
    interfaces = [
        Interface(name, tuple(addresses.get(name, ())), bool(state.isup), state.mtu) for name, state in states.items()
    ]
    route = network.route_to(info.master)
    gloo, nccl = (os.environ.get(name, "") for name in network.NAMES)
    return Interfaces(
        interfaces=tuple(interfaces),
        route=route[0] if route else "",
        master=info.master,
        nnodes=info.nnodes,
        gloo=gloo,
        nccl=nccl,
        gpus=nvidia.DRIVER.exists(),
    )


def judge_interfaces(facts: Interfaces) -> list[Finding]:
    findings, route, master = list[Finding](), facts.route, facts.master
    if not route:
        fix = f"ip route get {quoted(master)}   # then: --master-addr, an address that this machine reaches"
        findings += fail(message("no_interface_leads_to_master", master=master), fix)
    by_name = {interface.name: interface for interface in facts.interfaces}
    if facts.several and route in by_name and by_name[route].is_virtual:
        fix = "--master-addr ADDRESS   # one of another interface of the master"
        findings += warn(message("route_to_master_takes_container_interface", master=master, interface=route), fix)
    for name in filter(None, (part.strip() for part in facts.gloo.split(","))):
        findings += _judge_gloo_interface(name, by_name.get(name), facts)
    if facts.nccl:
        findings += _judge_nccl_interfaces(facts)
    if findings:
        return findings
    besides = [
        interface.name
        for interface in facts.interfaces
        if interface.up and interface.name != route and not interface.is_loop
    ]
    return ok(message("interface_leads_to_master", interface=route, master=master, besides=besides))


def _judge_gloo_interface(name: str, interface: Interface | None, facts: Interfaces) -> list[Finding]:
    """Judges an interface that GLOO_SOCKET_IFNAME names."""
    route, master = facts.route, facts.master
    fix = f"export GLOO_SOCKET_IFNAME={quoted(route)}" if route else "unset GLOO_SOCKET_IFNAME"
    chosen = f"GLOO_SOCKET_IFNAME={facts.gloo}"
    if interface is None:
        return fail(message("gloo_interface_is_unknown", chosen=chosen, interface=name, known=facts.names), fix)
    if not interface.up:
        fix = f"ip link set {quoted(name)} up   # or: {fix}"
        return fail(message("gloo_interface_is_down", chosen=chosen, interface=name), fix)
    if not interface.addresses:
        return fail(message("gloo_interface_has_no_address", chosen=chosen, interface=name), fix)
    if facts.several and (interface.is_loop or (interface.is_virtual and name != route)):
        why = message("chosen_interface_leads_to_no_machine", chosen=chosen, route=route, master=master)
        return fail(why, fix)
    if facts.several and name != route:
        return warn(message("chosen_interface_is_not_the_route", chosen=chosen, route=route, master=master), fix)
    if interface.is_virtual:
        return warn(message("chosen_interface_is_of_containers", chosen=chosen), fix)
    return []


def _judge_nccl_interfaces(facts: Interfaces) -> list[Finding]:
    """Judges NCCL_SOCKET_IFNAME."""
    route, master, pattern = facts.route, facts.master, facts.nccl
    matched = [entry for entry in facts.interfaces if entry.addresses and matches(pattern, entry.name)]
    chosen, fix = f"NCCL_SOCKET_IFNAME={pattern}", f"export NCCL_SOCKET_IFNAME={quoted(route or 'eth0')}"
    wrong = fail if facts.gpus else warn  # without a GPU nothing reads it
    if not matched:
        return wrong(message("nccl_interface_is_unknown", chosen=chosen, known=facts.names), fix)
    if facts.several and all(interface.is_loop or interface.is_virtual for interface in matched):
        why = message("chosen_interface_leads_to_no_machine", chosen=chosen, route=route, master=master)
        return wrong(why, fix)
    if facts.several and route and route not in [interface.name for interface in matched]:
        return warn(message("chosen_interface_is_not_the_route", chosen=chosen, route=route, master=master), fix)
    return []


def matches(pattern: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME fits an interface: prefixes separated by commas, with = names, after ^ all others."""
    excluded = pattern.startswith("^")
    listed = pattern.removeprefix("^")
    exact = listed.startswith("=")
    parts = [part for part in listed.removeprefix("=").split(",") if part]
    return any(name == part if exact else name.startswith(part) for part in parts) != excluded


@dataclass(frozen=True)
class Mtu:
    """The largest packet of one machine. interface: towards the master; '' without a route. mtu: bytes; 0: unknown."""

    interface: str
    mtu: int


def read_mtu(info: LaunchInfo) -> Mtu:
    route = network.route_to(info.master)
    state = psutil.net_if_stats().get(route[0]) if route else None
    return Mtu(route[0], state.mtu) if route and state else Mtu("", 0)


def judge_mtus(mtus: Mapping[str, Mtu]) -> list[Finding]:
    """Judges whether packets have one size: where machines differ, large ones may be lost."""
    known = {name: interface for name, interface in mtus.items() if interface.mtu}
    if not known:
        return ok(message("no_route_and_no_mtu"))
    findings: list[Finding] = []
    least = min(interface.mtu for interface in known.values())
    if values := differences(known, lambda interface: interface.mtu):
        largest = max(known.values(), key=lambda interface: interface.mtu)
        fix = f"ip link set {quoted(largest.interface)} mtu {least}   # where it is larger"
        findings += warn(message("mtu_differs_between_machines", values=values), fix)
    for name, interface in known.items():
        if interface.mtu < SMALLEST_MTU:
            why = message("mtu_is_small", interface=interface.interface, mtu=interface.mtu)
            findings += warn(why, f"ip link set {quoted(interface.interface)} mtu 1500", machine=name)
    return findings or ok(message("mtu_agrees", mtu=least))


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter, as the kernel reports it.

    adapter: its name. number: of the port. state, physical: as in '4: ACTIVE', '5: LinkUp'. rate: as in '200 Gb/sec (4X
    HDR)'.
    """

    adapter: str
    number: str
    state: str
    physical: str
    rate: str
    layer: str


@dataclass(frozen=True)
class InfiniBand:
    ports: tuple[Port, ...]


def read_infiniband(info: LaunchInfo) -> InfiniBand:
    return InfiniBand(tuple(_read_port(folder) for folder in sorted(ADAPTERS.glob("*/ports/*"))))


def _read_port(folder: Path) -> Port:
    texts = []
    for name in ("state", "phys_state", "rate", "link_layer"):
        text = ""
        with suppress(OSError):
            text = (folder / name).read_text().strip()
        texts.append(text)
    state, physical, rate, layer = texts
    return Port(folder.parents[1].name, folder.name, state, physical=physical, rate=rate, layer=layer)


def judge_infiniband(adapters: InfiniBand) -> list[Finding]:
    active = [port for port in adapters.ports if "ACTIVE" in port.state]
    findings = []
    for port in adapters.ports:
        if port not in active:
            variable = f"NCCL_IB_HCA=^{quoted(port.adapter)}" if active else "NCCL_IB_DISABLE=1"
            fields = {"state": port.state or "?", "physical": port.physical or "?"}
            why = message("infiniband_port_is_not_active", number=port.number, adapter=port.adapter, **fields)
            fix = f"export {variable}   # until it is: see ibstat, the cable, and the subnet manager (opensm)"
            findings += warn(why, fix)
    if findings:
        return findings
    ports = [f"{port.adapter}:{port.number} {port.rate}" for port in active]
    return ok(message("infiniband_ports_are_active", ports=ports) if ports else message("no_infiniband"))


PROBES = (
    MachineProbe(
        name="interfaces",
        group="network",
        facts=Interfaces,
        gather=read_interfaces,
        judge=for_each(judge_interfaces),
    ),
    MachineProbe(name="mtu", group="network", facts=Mtu, gather=read_mtu, judge=judge_mtus),
    MachineProbe(
        name="infiniband",
        group="network",
        facts=InfiniBand,
        gather=read_infiniband,
        judge=for_each(judge_infiniband),
    ),
)
