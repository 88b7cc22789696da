"""Faults of the network that one machine alone can have: interfaces and InfiniBand."""

from __future__ import annotations

from world.faults.fault import Fault, env, sys_class

FAULTS = (
    Fault("InfiniBand's port is down", "infiniband", "1: DOWN", sys_class("1: DOWN", "3: Disabled")),
    env("gloo's interface does not exist", "interfaces", "no interface eth9", GLOO_SOCKET_IFNAME="eth9"),
    Fault(
        "gloo's interface is down",
        "interfaces",
        "is down",
        'unshare -n sh -c \'ip link set lo up; ip link add down0 type bridge; exec "$@"\' sh "$@"',
        {"GLOO_SOCKET_IFNAME": "down0"},
    ),
    env("NCCL's interface does not exist", "interfaces", "fits no interface", NCCL_SOCKET_IFNAME="ib"),
    Fault(
        "ranks do not meet on gloo's interface",
        "collective",
        "with GLOO_SOCKET_IFNAME=eth9",
        env={"GLOO_SOCKET_IFNAME": "eth9"},
        torch=True,
        fixes="export GLOO_SOCKET_IFNAME=lo",
    ),
)
