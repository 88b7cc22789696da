"""Facts of the probes of 'network', and what is found in them."""

from __future__ import annotations

from typing import Any

from doctor.probes.row import Row
from samestep.doctor.machine import Flow, TrialRecord
from samestep.doctor.probes import collective, links
from samestep.doctor.probes.collective import Attempts
from samestep.doctor.probes.interfaces import InfiniBand, Interface, Interfaces, Mtu, Port
from samestep.doctor.probes.links import Links, Reachability, Stream
from samestep.message import message
from samestep.world.network import Dialled, Outcome

LO = Interface("lo", ("127.0.0.1", "::1"), True, 65536)
ETH = Interface("eth0", ("10.0.0.2",), True, 1500)
DOCKER = Interface("docker0", ("172.17.0.1",), True, 1500)
OFF = Interface("eth1", ("10.1.0.2",), False, 1500)
BARE = Interface("eth2", (), True, 1500)
HCA = Port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", "InfiniBand")
WAITED = "TimeoutError: no answer within 22 s"
NO_FACE = "RuntimeError: Unable to find address for: eth9"


def faces(*more: Interface, route: str = "eth0", nnodes: int = 2, **chosen: Any) -> Interfaces:
    given = {"gloo": "", "nccl": "", "gpus": False} | chosen
    return Interfaces((LO, ETH, *more), route, "10.0.0.1", nnodes, **given)


def attempt(*ranks: TrialRecord, **variables: str) -> collective.Attempt:
    """Of these ranks; of two that succeeded where none is given."""
    two = [TrialRecord(n, "", None, 0.1, matmul_s=0.08, all_reduce_s=0.004, backend="gloo") for n in range(2)]
    return collective.Attempt(variables, ranks or tuple(two))


def failing(*errors: str) -> collective.Attempt:
    return attempt(*(TrialRecord(rank, error) for rank, error in enumerate(errors)))


def dialled(outcome: Outcome) -> Reachability:
    back = links.Attempt("h1", "h0", "10.0.0.1", 40001, Dialled("open", 0.0002))
    return Reachability((links.Attempt("h0", "h1", "10.0.0.2", 40002, Dialled(outcome, 2.0)), back))


def streams(**mbit_s: float) -> Links:
    """Of names as h0_h1."""
    found = [(*name.split("_"), rate) for name, rate in mbit_s.items()]
    return Links(tuple(Stream(a, b, Flow(int(rate * 1e6 / 8), 1.0)) for a, b, rate in found))


ROWS: list[Row] = [
    (
        "interfaces",
        faces(DOCKER),
        "OK",
        "interface_leads_to_master",
        {"interface": "eth0", "master": "10.0.0.1", "besides": ["docker0"]},
        "",
    ),
    ("interfaces", faces(gloo="eth9"), "FAIL", "gloo_interface_is_unknown", {"interface": "eth9"}, "IFNAME=eth0"),
    ("interfaces", faces(gloo="lo"), "FAIL", "chosen_interface_leads_to_no_machine", {}, "IFNAME=eth0"),
    ("interfaces", faces(DOCKER, gloo="docker0"), "FAIL", "chosen_interface_leads_to_no_machine", {}, "IFNAME=eth0"),
    (
        "interfaces",
        faces(DOCKER, gloo="docker0", nnodes=1),
        "WARN",
        "chosen_interface_is_of_containers",
        {},
        "IFNAME=eth0",
    ),
    ("interfaces", faces(OFF, gloo="eth1"), "FAIL", "gloo_interface_is_down", {}, "ip link set eth1 up"),
    ("interfaces", faces(BARE, gloo="eth2"), "FAIL", "gloo_interface_has_no_address", {}, "IFNAME=eth0"),
    ("interfaces", faces(nccl="ib"), "WARN", "nccl_interface_is_unknown", {}, "NCCL_SOCKET_IFNAME=eth0"),
    ("interfaces", faces(nccl="ib", gpus=True), "FAIL", "nccl_interface_is_unknown", {}, "NCCL_SOCKET_IFNAME=eth0"),
    (
        "interfaces",
        faces(DOCKER, nccl="^eth,lo", gpus=True),
        "FAIL",
        "chosen_interface_leads_to_no_machine",
        {},
        "NCCL_SOCKET_IFNAME=eth0",
    ),
    ("interfaces", faces(DOCKER, nccl="^docker"), "OK", "interface_leads_to_master", {"interface": "eth0"}, ""),
    ("interfaces", faces(route=""), "FAIL", "no_interface_leads_to_master", {}, "ip route get"),
    (
        "interfaces",
        faces(DOCKER, route="docker0"),
        "WARN",
        "route_to_master_takes_container_interface",
        {},
        "--master-addr",
    ),
    ("mtu", {"h0": Mtu("eth0", 1500), "h1": Mtu("ens3", 1500)}, "OK", "mtu_agrees", {"mtu": 1500}, ""),
    ("mtu", {"h0": Mtu("eth0", 1500), "h1": Mtu("eth0", 9000)}, "WARN", "mtu_differs_between_machines", {}, "mtu 1500"),
    ("mtu", Mtu("eth0", 576), "WARN", "mtu_is_small", {"mtu": 576}, "mtu 1500"),
    ("infiniband", InfiniBand(()), "OK", "no_infiniband", {}, ""),
    ("infiniband", InfiniBand((HCA,)), "OK", "infiniband_ports_are_active", {}, ""),
    (
        "infiniband",
        InfiniBand((Port("mlx5_0", "1", "1: DOWN", "3: Disabled", "", ""),)),
        "WARN",
        "infiniband_port_is_not_active",
        {"state": "1: DOWN"},
        "NCCL_IB_DISABLE=1",
    ),
    (
        "infiniband",
        InfiniBand((HCA, Port("mlx5_1", "1", "2: INIT", "5: LinkUp", "", ""))),
        "WARN",
        "infiniband_port_is_not_active",
        {"adapter": "mlx5_1"},
        "NCCL_IB_HCA=^mlx5_1",
    ),
    ("reachability", dialled("open"), "OK", "random_ports_are_reached", {"connections": 2}, ""),
    (
        "reachability",
        dialled("dropped"),
        "FAIL",
        "machine_does_not_answer",
        {"source": "h0", "target": "h1", "port": 40002},
        "iptables -I INPUT -s h0",
    ),
    (
        "reachability",
        dialled("refused"),
        "FAIL",
        "machine_refuses_connections",
        {"source": "h0", "target": "h1"},
        "ip_local_port_range",
    ),
    ("reachability", dialled("no route"), "FAIL", "no_route_to_machine", {}, "ip route get 10.0.0.2"),
    ("links", Links(()), "OK", "one_machine_has_no_link", {}, ""),
    ("links", streams(h0_h1=9400, h1_h0=9300), "OK", "links_are_fast", {"mbit_s": 9300.0}, ""),
    (
        "links",
        streams(h0_h1=95, h1_h0=94),
        "WARN",
        "link_is_slow",
        {"source": "h0", "target": "h1", "mbit_s": 95.0, "back_mbit_s": 94.0},
        "ethtool",
    ),
    (
        "links",
        streams(h0_h1=9400, h1_h0=2000),
        "WARN",
        "link_is_slower_one_way",
        {"source": "h1", "target": "h0", "mbit_s": 2000.0, "back_mbit_s": 9400.0},
        "ethtool",
    ),
    (
        "links",
        streams(h0_h1=940, h1_h0=940, h0_h2=95, h2_h0=940, h1_h2=94, h2_h1=940),
        "WARN",
        "machine_receives_slowly",
        {"machine": "h2", "mbit_s": 94.5},
        "on h2",
    ),
    ("links", Links((Stream("h0", "h1", Flow(9, 0.0, "stopped")),)), "FAIL", "stream_does_not_arrive", {}, "mtu"),
    ("collective", Attempts((attempt(),)), "OK", "ranks_all_reduce", {"ranks": 2, "backend": "gloo"}, ""),
    (
        "collective",
        Attempts((failing(WAITED, NO_FACE),)),
        "FAIL",
        "ranks_do_not_all_reduce",
        {"error": message("rank_raised", rank=1, error=NO_FACE)},
        "DETAIL",
    ),
    (
        "collective",
        Attempts((attempt(TrialRecord(0, WAITED), TrialRecord(1, "out of memory", exit_code=-9)),)),
        "FAIL",
        "ranks_do_not_all_reduce",
        {"error": message("rank_process_was_killed", rank=1, signal=9, line="out of memory")},
        "DETAIL",
    ),
    (
        "collective",
        Attempts(
            (failing(NO_FACE, NO_FACE), attempt(GLOO_SOCKET_IFNAME="eth0")),
            environment={"GLOO_SOCKET_IFNAME": "eth9"},
        ),
        "FAIL",
        "ranks_all_reduce_with_other_settings",
        {"chosen": ["GLOO_SOCKET_IFNAME=eth9"]},
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "collective",
        Attempts((failing(WAITED, WAITED), attempt(GLOO_SOCKET_IFNAME="eth0"))),
        "WARN",
        "ranks_connect_on_another_interface",
        {"working": "GLOO_SOCKET_IFNAME=eth0"},
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "collective",
        Attempts((failing(WAITED, WAITED), attempt(NCCL_P2P_DISABLE="1"))),
        "FAIL",
        "ranks_all_reduce_with_other_settings",
        {"chosen": [], "working": "NCCL_P2P_DISABLE=1"},
        "export NCCL_P2P_DISABLE=1",
    ),
    (
        "collective",
        Attempts((attempt(*(TrialRecord(n, matmul_s=0.4 if n == 2 else 0.08, all_reduce_s=0.01) for n in range(4))),)),
        "WARN",
        "rank_is_a_straggler",
        {"rank": 2},
        "top",
    ),
]
