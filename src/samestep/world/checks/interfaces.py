"""The network interfaces: which leads to the master, and whether gloo and NCCL are set to use one that does."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from samestep.world import network, nvidia
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "network"
VIRTUAL = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "cali",
    "kube",
    "vmnet",
    "vboxnet",
    "podman",
    "lxc",
    "lxd",
)


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int

    @property
    def is_loop(self) -> bool:
        return bool(self.addresses) and all(ipaddress.ip_address(each).is_loopback for each in self.addresses)

    @property
    def is_virtual(self) -> bool:
        """Whether it leads to containers of this machine alone, by its name."""
        return self.name.startswith(VIRTUAL)


@dataclass(frozen=True)
class Facts:
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


def probe(info: LaunchInfo) -> Facts:
    states, addresses = psutil.net_if_stats(), network.interfaces()
    interfaces = [
        Interface(name, tuple(addresses.get(name, ())), bool(state.isup), state.mtu) for name, state in states.items()
    ]
    route = network.route_to(info.master)
    gloo, nccl = (os.environ.get(name, "") for name in network.NAMES)
    gpus = nvidia.DRIVER.exists()
    return Facts(tuple(interfaces), route[0] if route else "", info.master, info.nnodes, gloo, nccl, gpus)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    findings, several = [], seen.nnodes > 1
    if not seen.route:
        findings += fail(
            f"no interface leads to the master, {seen.master}: the name is unknown here, or there is no route",
            f"ip route get {seen.master}   # then: --master-addr, an address that this machine reaches",
        )
    names = {each.name: each for each in seen.interfaces}
    if several and seen.route in names and names[seen.route].is_virtual:
        findings += warn(
            f"the route to {seen.master} takes {seen.route}, which leads to containers of this machine by its name",
            "--master-addr ADDRESS   # one of another interface of the master",
        )
    for name in filter(None, (part.strip() for part in seen.gloo.split(","))):
        findings += _chosen(name, names.get(name), seen)
    if seen.nccl:
        findings += _chosen_by_pattern(seen)
    if findings:
        return findings
    others = [each.name for each in seen.interfaces if each.up and each.name != seen.route and not each.is_loop]
    also = f"; besides {', '.join(others)}" if others else ""
    return ok(f"{seen.route} leads to {seen.master}{also}")


def _chosen(name: str, interface: Interface | None, seen: Facts) -> list[Finding]:
    """Judges an interface that GLOO_SOCKET_IFNAME names."""
    fix = f"export GLOO_SOCKET_IFNAME={seen.route}" if seen.route else "unset GLOO_SOCKET_IFNAME"
    said = f"GLOO_SOCKET_IFNAME={seen.gloo}"
    if interface is None:
        return fail(f"{said}: this machine has no interface {name}, but {_names(seen)}", fix)
    if not interface.up:
        return fail(f"{said}: the interface {name} is down", f"ip link set {name} up   # or: {fix}")
    if not interface.addresses:
        return fail(f"{said}: the interface {name} has no address", fix)
    if seen.nnodes > 1 and (interface.is_loop or (interface.is_virtual and name != seen.route)):
        return fail(f"{said} leads to no other machine; {seen.route or 'another'} leads to {seen.master}", fix)
    if seen.nnodes > 1 and name != seen.route:
        return warn(f"{said}, and the route to {seen.master} takes {seen.route}", fix)
    if interface.is_virtual:
        return warn(f"{said}: an interface of containers, which may go when they go", fix)
    return []


def _chosen_by_pattern(seen: Facts) -> list[Finding]:
    """Judges NCCL_SOCKET_IFNAME."""
    matched = [each for each in seen.interfaces if each.addresses and matches(seen.nccl, each.name)]
    said, fix = f"NCCL_SOCKET_IFNAME={seen.nccl}", f"export NCCL_SOCKET_IFNAME={seen.route or 'eth0'}"
    wrong = fail if seen.gpus else warn  # without a GPU nothing reads it
    if not matched:
        return wrong(f"{said} fits no interface of this machine: {_names(seen)}", fix)
    if seen.nnodes > 1 and all(each.is_loop or each.is_virtual for each in matched):
        return wrong(f"{said} leads to no other machine; {seen.route or 'another'} leads to {seen.master}", fix)
    if seen.nnodes > 1 and seen.route and seen.route not in [each.name for each in matched]:
        return warn(f"{said}, and the route to {seen.master} takes {seen.route}", fix)
    return []


def matches(pattern: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME fits an interface: prefixes separated by commas, with = names, after ^ all others."""
    excluded = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    parts = [part for part in rest.removeprefix("=").split(",") if part]
    return any(name == part if exact else name.startswith(part) for part in parts) != excluded


def _names(seen: Facts) -> str:
    return ", ".join(each.name for each in seen.interfaces if each.addresses)
