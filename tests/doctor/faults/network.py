"""Faults of the network that one machine alone can have: interfaces and InfiniBand."""

from __future__ import annotations

from doctor.faults.fault import Fault, env, sys_class

FAULTS = (
    Fault(
        "InfiniBand's port is down", "infiniband", "infiniband_port_is_not_active", sys_class("1: DOWN", "3: Disabled")
    ),
    env("gloo's interface does not exist", "interfaces", "gloo_interface_is_unknown", GLOO_SOCKET_IFNAME="eth9"),
    Fault(
        "gloo's interface is down",
        "interfaces",
        "gloo_interface_is_down",
        'unshare -n sh -c \'ip link set lo up; ip link add down0 type bridge; exec "$@"\' sh "$@"',
        {"GLOO_SOCKET_IFNAME": "down0"},
    ),
    env("NCCL's interface does not exist", "interfaces", "nccl_interface_is_unknown", NCCL_SOCKET_IFNAME="ib"),
    Fault(
        "ranks do not meet on gloo's interface",
        "collective",
        "ranks_all_reduce_with_other_settings",
        env={"GLOO_SOCKET_IFNAME": "eth9"},
        torch=True,
        fixes="export GLOO_SOCKET_IFNAME=lo",
    ),
)
