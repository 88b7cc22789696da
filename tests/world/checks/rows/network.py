"""Facts of the checks of the group 'network', and what is said of them."""

from __future__ import annotations

from typing import Any

from samestep.world.checks import collective, infiniband, interfaces, links, mtu, reachability
from samestep.world.machine import Dialled, Flow, Outcome, RankTried

LO = interfaces.Interface("lo", ("127.0.0.1", "::1"), True, 65536)
ETH = interfaces.Interface("eth0", ("10.0.0.2",), True, 1500)
DOCKER = interfaces.Interface("docker0", ("172.17.0.1",), True, 1500)
OFF = interfaces.Interface("eth1", ("10.1.0.2",), False, 1500)
BARE = interfaces.Interface("eth2", (), True, 1500)
HCA = infiniband.Port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", "InfiniBand")
WAITED = "TimeoutError: no answer within 22 s"
NO_FACE = "RuntimeError: Unable to find address for: eth9"


def faces(*more: interfaces.Interface, route: str = "eth0", nnodes: int = 2, **chosen: Any) -> interfaces.Facts:
    given = {"gloo": "", "nccl": "", "gpus": False} | chosen
    return interfaces.Facts((LO, ETH, *more), route, "10.0.0.1", nnodes, **given)


def tried(**seen: Any) -> collective.Try:
    ranks = [RankTried(n, "", 0.1, 0.08, 0.004, "gloo") for n in range(2)]
    return collective.Try({}, tuple(seen.get("ranks", ranks)))


def dialled(outcome: Outcome) -> reachability.Facts:
    back = reachability.Attempt("h1", "h0", "10.0.0.1", 40001, Dialled("open", 0.0002))
    return reachability.Facts((reachability.Attempt("h0", "h1", "10.0.0.2", 40002, Dialled(outcome, 2.0)), back))


def streams(**mbit_s: float) -> links.Facts:
    """Of names as h0_h1."""
    found = [(*name.split("_"), rate) for name, rate in mbit_s.items()]
    return links.Facts(tuple(links.Stream(a, b, Flow(int(rate * 1e6 / 8), 1.0)) for a, b, rate in found))


# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("interfaces", faces(DOCKER), "OK", "eth0 leads to 10.0.0.1; besides docker0", ""),
    ("interfaces", faces(gloo="eth9"), "FAIL", "no interface eth9", "IFNAME=eth0"),
    ("interfaces", faces(gloo="lo"), "FAIL", "no other machine", "IFNAME=eth0"),
    ("interfaces", faces(DOCKER, gloo="docker0"), "FAIL", "no other machine", "IFNAME=eth0"),
    ("interfaces", faces(DOCKER, gloo="docker0", nnodes=1), "WARN", "of containers", "IFNAME=eth0"),
    ("interfaces", faces(OFF, gloo="eth1"), "FAIL", "is down", "ip link set eth1 up"),
    ("interfaces", faces(BARE, gloo="eth2"), "FAIL", "no address", "IFNAME=eth0"),
    ("interfaces", faces(nccl="ib"), "WARN", "fits no interface", "NCCL_SOCKET_IFNAME=eth0"),
    ("interfaces", faces(nccl="ib", gpus=True), "FAIL", "fits no interface", "NCCL_SOCKET_IFNAME=eth0"),
    ("interfaces", faces(DOCKER, nccl="^eth,lo", gpus=True), "FAIL", "no other machine", "NCCL_SOCKET_IFNAME=eth0"),
    ("interfaces", faces(DOCKER, nccl="^docker"), "OK", "eth0 leads", ""),
    ("interfaces", faces(route=""), "FAIL", "no route", "ip route get"),
    ("interfaces", faces(DOCKER, route="docker0"), "WARN", "containers of this machine", "--master-addr"),
    ("mtu", {"h0": mtu.Facts("eth0", 1500), "h1": mtu.Facts("ens3", 1500)}, "OK", "1500 bytes", ""),
    ("mtu", {"h0": mtu.Facts("eth0", 1500), "h1": mtu.Facts("eth0", 9000)}, "WARN", "h1: 9000", "mtu 1500"),
    ("mtu", mtu.Facts("eth0", 576), "WARN", "576 bytes", "mtu 1500"),
    ("infiniband", infiniband.Facts(()), "OK", "no InfiniBand", ""),
    ("infiniband", infiniband.Facts((HCA,)), "OK", "200 Gb/sec", ""),
    (
        "infiniband",
        infiniband.Facts((infiniband.Port("mlx5_0", "1", "1: DOWN", "3: Disabled", "", ""),)),
        "WARN",
        "1: DOWN",
        "NCCL_IB_DISABLE=1",
    ),
    (
        "infiniband",
        infiniband.Facts((HCA, infiniband.Port("mlx5_1", "1", "2: INIT", "5: LinkUp", "", ""))),
        "WARN",
        "mlx5_1",
        "NCCL_IB_HCA=^mlx5_1",
    ),
    ("reachability", dialled("open"), "OK", "2 connections", ""),
    ("reachability", dialled("dropped"), "FAIL", "h0 does not reach port 40002 of h1", "iptables -I INPUT -s h0"),
    ("reachability", dialled("refused"), "FAIL", "rejects it; h1 reaches h0", "ip_local_port_range"),
    ("reachability", dialled("no route"), "FAIL", "a link is cut", "ip route get 10.0.0.2"),
    ("links", links.Facts(()), "OK", "no link", ""),
    ("links", streams(h0_h1=9400, h1_h0=9300), "OK", "9.3 Gbit/s or more", ""),
    ("links", streams(h0_h1=95, h1_h0=94), "WARN", "from h0 to h1 is slow: 95 Mbit/s, and 94 Mbit/s back", "ethtool"),
    ("links", streams(h0_h1=9400, h1_h0=2000), "WARN", "h1 to h0 carries 2.0 Gbit/s, and 9.4", "ethtool"),
    (
        "links",
        streams(h0_h1=940, h1_h0=940, h0_h2=95, h2_h0=940, h1_h2=94, h2_h1=940),
        "WARN",
        "the link of h2 is slow: 94 Mbit/s from the others",
        "on h2",
    ),
    ("links", links.Facts((links.Stream("h0", "h1", Flow(9, 0.0, "the stream stopped")),)), "FAIL", "arrive", "mtu"),
    ("collective", collective.Facts((tried(),)), "OK", "2 ranks connect over gloo", ""),
    (
        "collective",
        collective.Facts((tried(ranks=[RankTried(0, WAITED), RankTried(1, NO_FACE)]),)),
        "FAIL",
        "rank 1: RuntimeError: Unable to find",
        "DETAIL",
    ),
    (
        "collective",
        collective.Facts(
            (
                tried(ranks=[RankTried(0, NO_FACE), RankTried(1, NO_FACE)]),
                collective.Try({"GLOO_SOCKET_IFNAME": "eth0"}, tried().ranks),
            ),
            set_here={"GLOO_SOCKET_IFNAME": "eth9"},
        ),
        "FAIL",
        "with GLOO_SOCKET_IFNAME=eth9",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "collective",
        collective.Facts(
            (
                tried(ranks=[RankTried(0, WAITED), RankTried(1, WAITED)]),
                collective.Try({"GLOO_SOCKET_IFNAME": "eth0"}, tried().ranks),
            )
        ),
        "WARN",
        "samestep run sets this itself",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "collective",
        collective.Facts(
            (
                tried(ranks=[RankTried(0, WAITED), RankTried(1, WAITED)]),
                collective.Try({"NCCL_P2P_DISABLE": "1"}, tried().ranks),
            )
        ),
        "FAIL",
        "and can with NCCL_P2P_DISABLE=1",
        "export NCCL_P2P_DISABLE=1",
    ),
    (
        "collective",
        collective.Facts((tried(ranks=[RankTried(n, "", 0.1, 0.4 if n == 2 else 0.08, 0.01) for n in range(4)]),)),
        "WARN",
        "rank 2 is a straggler",
        "top",
    ),
]
