"""What each check says of facts as machines have given them, good and bad: its status, its words, and what fixes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from samestep.records.files import as_json, from_json
from samestep.world import checks
from samestep.world.checks import (
    clock,
    collective,
    cpus,
    disk,
    engine_packages,
    gpus,
    hostname,
    infiniband,
    installation,
    interfaces,
    launch_variables,
    links,
    locale,
    machines,
    master,
    memlock,
    memory,
    mtu,
    open_files,
    port,
    reachability,
    shared_memory,
    throttling,
    torch_build,
    variables,
    versions,
)
from samestep.world.machine import Dialled, Flow, Outcome, RankTried

MIB, GIB = 2**20, 2**30
SHM = shared_memory.Facts
NAME = hostname.Facts("h1", ("10.0.0.2",), ("127.0.0.1", "10.0.0.2"), "", "eth0", 2)
LO = interfaces.Interface("lo", ("127.0.0.1", "::1"), True, 65536)
ETH = interfaces.Interface("eth0", ("10.0.0.2",), True, 1500)
DOCKER = interfaces.Interface("docker0", ("172.17.0.1",), True, 1500)
OFF = interfaces.Interface("eth1", ("10.1.0.2",), False, 1500)
BARE = interfaces.Interface("eth2", (), True, 1500)
OUT = disk.Folder("/data", 500 * GIB, 10**6, 800.0, "")
TMP = disk.Folder("/tmp", 50 * GIB, 10**6, 800.0, "")
GPU = gpus.Gpu("NVIDIA H100 80GB HBM3")
HCA = infiniband.Port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "200 Gb/sec (4X HDR)", "InfiniBand")
VERSIONS = versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 aa", "", "")


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


def connect_error(outcome: Outcome) -> master.Facts:
    return master.Facts("h1", "h0", 29500, 2, ("10.0.0.1",), Dialled(outcome, 2.0))


WAITED = "TimeoutError: no answer within 22 s"
NO_FACE = "RuntimeError: Unable to find address for: eth9"
BROKEN = engine_packages.Package("lightning", "2.6.6", ">=2.4", True, "ImportError: cannot import name 'x'")
OLD = engine_packages.Package("deepspeed", "0.10.0", ">=0.19.8", False, "")

# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("shared_memory", SHM(24 * GIB, 24 * GIB, 2), "OK", "free of", ""),
    ("shared_memory", SHM(64 * MIB, 64 * MIB, 2), "FAIL", "SIGBUS", "remount,size=8G"),
    ("shared_memory", SHM(8 * GIB, 1 * MIB, 2), "FAIL", "it is full", "ls -lS"),
    ("shared_memory", SHM(8 * GIB, GIB, 8), "WARN", "little for 8 ranks", "--shm-size"),
    ("shared_memory", SHM(None, None, 2), "UNKNOWN", "no /dev/shm", ""),
    ("memlock", memlock.Facts(8 * MIB, ()), "OK", "only InfiniBand needs more", ""),
    ("memlock", memlock.Facts(None, ("mlx5_0",)), "OK", "unlimited", ""),
    ("memlock", memlock.Facts(64 * 1024, ("mlx5_0",)), "FAIL", "0.06 MiB", "memlock unlimited"),
    ("open_files", open_files.Facts(1024, 524288, 2), "OK", "1024 files", ""),
    ("open_files", open_files.Facts(512, 524288, 2), "WARN", "512 files", "ulimit -n 65536"),
    ("open_files", open_files.Facts(128, 512, 2), "FAIL", "Too many open files", "limits.d"),
    ("open_files", open_files.Facts(128, 20000, 2), "FAIL", "Too many open files", "ulimit -n 20000"),
    ("open_files", open_files.Facts(1024, 1048576, 512), "FAIL", "too few for 512 ranks", "ulimit -n"),
    ("memory", memory.Facts(24 * GIB, 20 * GIB, None, None, 0, 2), "OK", "20.0 GiB", ""),
    ("memory", memory.Facts(24 * GIB, 20 * GIB, GIB, 300 * MIB, 0, 2), "FAIL", "control group", "--nproc 1"),
    ("memory", memory.Facts(24 * GIB, GIB, None, None, 0, 2), "WARN", "little for 2 ranks", "--nproc 1"),
    ("cpus", cpus.Facts(8, 8, None, "", 2), "OK", "8 of 8 cores", ""),
    ("cpus", cpus.Facts(8, 8, 0.5, "", 2), "WARN", "0.5 cores", "--cpus=2"),
    ("cpus", cpus.Facts(8, 1, None, "", 2), "WARN", "2 ranks share 1 core, of the 8", "taskset"),
    ("cpus", cpus.Facts(8, 8, None, "8", 2), "WARN", "8 threads each", "OMP_NUM_THREADS=4"),
    ("cpus", cpus.Facts(8, 8, None, "all", 2), "FAIL", "no number", "OMP_NUM_THREADS=4"),
    ("throttling", throttling.Facts(3400.0, 3500.0, 0, ("performance",)), "OK", "not throttled", ""),
    ("throttling", throttling.Facts(800.0, 3500.0, 0, ("powersave",)), "WARN", "800 of 3500 MHz", "performance"),
    ("throttling", throttling.Facts(3400.0, 3500.0, 41, ("performance",)), "WARN", "41 times", "sensors"),
    ("throttling", throttling.Facts(0.0, 0.0, None, ()), "UNKNOWN", "tells nothing", ""),
    ("hostname", NAME, "OK", "10.0.0.2", ""),
    ("hostname", hostname.Facts("h1", ("127.0.1.1",), NAME.mine, "", "eth0", 2), "WARN", "127.0.1.1", "IFNAME=eth0"),
    ("hostname", hostname.Facts("h1", ("127.0.1.1",), NAME.mine, "", "lo", 1), "OK", "127.0.1.1", ""),
    ("hostname", hostname.Facts("h1", (), NAME.mine, "", "eth0", 2), "WARN", "unknown", "IFNAME=eth0"),
    ("hostname", hostname.Facts("h1", ("10.9.9.9",), NAME.mine, "", "lo", 1), "WARN", "none of its", "IFNAME=lo"),
    ("hostname", hostname.Facts("h1", ("10.9.9.9",), NAME.mine, "eth0", "eth0", 2), "OK", "instead", ""),
    ("disk", disk.Facts(OUT, TMP), "OK", "500.0 GiB free", ""),
    ("disk", disk.Facts(disk.Folder("/data", 50 * MIB, None, 90.0, ""), TMP), "FAIL", "50 MiB left", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 500 * MIB, None, 90.0, ""), TMP), "WARN", "500 MiB left", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 9 * GIB, 12, 90.0, ""), TMP), "FAIL", "inodes", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 9 * GIB, None, 0.4, ""), TMP), "WARN", "0.4 MiB/s", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 0, None, 0, "EROFS: Read-only"), TMP), "FAIL", "EROFS", "--out"),
    ("disk", disk.Facts(OUT, disk.Folder("/tmp", MIB, None, 90.0, "")), "FAIL", "temporary files", "TMPDIR"),
    ("clock", clock.Facts((clock.Offset("h1", 0.02, 0.001),)), "OK", "within 20 ms", ""),
    ("clock", clock.Facts((clock.Offset("h1", -90.0, 0.001),)), "WARN", "90.0 s behind", "set-ntp"),
    ("locale", locale.Facts("UTF-8", "utf-8", "LANG=C.UTF-8"), "OK", "UTF-8", ""),
    ("locale", locale.Facts("ANSI_X3.4-1968", "ascii", "LC_ALL=C"), "WARN", "UnicodeDecodeError", "C.UTF-8"),
    ("versions", {"h0": VERSIONS, "h1": VERSIONS}, "OK", "torch 2.13.0", ""),
    (
        "versions",
        {"h0": replace(VERSIONS, job=versions.MISSING)},
        "FAIL",
        "the job's file is not there",
        "ls *.py",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.12.0", "2.2.6", "0.1.0 aa", "", "")},
        "FAIL",
        "h0: 2.13.0; h1: 2.12.0",
        "torch==2.13.0",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 bb", "", "")},
        "FAIL",
        "samestep is not the same",
        "samestep==0.1.0",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 aa", "ff", "")},
        "FAIL",
        "the job's file",
        "scp",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.12.1", "2.13.0", "2.2.6", "0.1.0 aa", "", "")},
        "WARN",
        "h1: 3.12",
        "venv",
    ),
    ("installation", installation.Facts("/venv", "/venv", "/venv", ()), "OK", "/venv", ""),
    ("installation", installation.Facts("/venv", "/other", "", ()), "WARN", "/other is active", "activate"),
    ("installation", installation.Facts("/venv", "", "/usr", ()), "WARN", "that of /usr", "PATH=/venv/bin"),
    ("installation", installation.Facts("/venv", "", "", ("/w/torch.py",)), "WARN", "hides", "mv /w/torch.py"),
    (
        "installation",
        {"h0": installation.Facts("/a", "", "", ()), "h1": installation.Facts("/b", "", "", ())},
        "WARN",
        "h0: /a; h1: /b",
        "/a",
    ),
    ("torch_build", torch_build.Facts("", "2.13.0+cpu"), "OK", "for CPUs", ""),
    ("torch_build", torch_build.Facts("ImportError: libtorch"), "FAIL", "does not import", "--force-reinstall"),
    ("torch_build", torch_build.Facts("", "2.13.0+cpu", "", "550.54", 8), "FAIL", "without CUDA", "pip install torch"),
    ("torch_build", torch_build.Facts("", "2.13.0", "13.0", "470.1", 8), "FAIL", "driver may be too old", "nvidia-smi"),
    ("torch_build", torch_build.Facts("", "2.13.0", "13.0", "580.1", 8, 0, ""), "FAIL", "hides them", "unset CUDA_VIS"),
    (
        "torch_build",
        torch_build.Facts("", "2.13.0", "13.0", "580.1", 1, 1, None, ("Tesla K80 (sm_37)",)),
        "FAIL",
        "Tesla K80",
        "another build",
    ),
    ("torch_build", torch_build.Facts("", "2.13", "13.0", "580.1", 1, 1, None, (), "2.29.3"), "OK", "NCCL 2.29.3", ""),
    ("torch_build", torch_build.Facts("", "2.13.0", gloo=False), "FAIL", "no gloo", "another"),
    ("engine_packages", engine_packages.Facts(()), "OK", "besides torch", ""),
    ("engine_packages", engine_packages.Facts((BROKEN,)), "FAIL", "does not import", "--upgrade 'lightning>=2.4'"),
    ("engine_packages", engine_packages.Facts((OLD,)), "WARN", "0.10.0", "deepspeed>=0.19.8"),
    ("launch_variables", launch_variables.Facts(""), "OK", "no launcher's", ""),
    ("launch_variables", launch_variables.Facts("RANK=3 is not below", {"RANK": "3"}), "FAIL", "RANK=3", "unset RANK"),
    ("launch_variables", launch_variables.Facts("", {"WORLD_SIZE": "1"}), "WARN", "WORLD_SIZE=1", "unset WORLD_SIZE"),
    ("launch_variables", launch_variables.Facts("", {"MASTER_PORT": "x"}), "FAIL", "MASTER_PORT=x", "29500"),
    ("port", port.Facts(0), "OK", "no port", ""),
    ("port", port.Facts(29500, "Address already in use", "process 7 (python)"), "FAIL", "process 7", "--port 0"),
    ("port", port.Facts(80, "Permission denied"), "FAIL", "Permission denied", "--port 0"),
    ("machines", {f"h{n}": machines.Facts(n, 2, 2, "h0", "") for n in range(2)}, "OK", "2 of 2 machines", ""),
    ("machines", {f"h{n}": machines.Facts(1, 2, 2, "h0", "") for n in range(2)}, "FAIL", "h0 and h1 both", "rank 0"),
    ("machines", {"h0": machines.Facts(0, 3, 2, "h0", "")}, "FAIL", "1 of 3 machines", "same line"),
    (
        "machines",
        {"h0": machines.Facts(0, 2, 2, "h0", ""), "h1": machines.Facts(1, 3, 2, "h0", "")},
        "FAIL",
        "h0: 2; h1: 3",
        "same line",
    ),
    (
        "machines",
        {"h0": machines.Facts(0, 2, 2, "h0", ""), "h1": machines.Facts(1, 2, 4, "h0", "")},
        "WARN",
        "h0: 2; h1: 4",
        "--nproc 2",
    ),
    ("master", master.Facts("h1", "h0", 29500, 2, ("10.0.0.1",), None), "OK", "10.0.0.1", ""),
    ("master", master.Facts("h1", "h0", 29500, 2, (), None), "FAIL", "unknown on h1", "/etc/hosts"),
    ("master", master.Facts("h1", "h0", 29500, 2, ("127.0.1.1",), None), "FAIL", "127.0.1.1", "--master-addr"),
    ("master", connect_error("refused"), "FAIL", "refused", "ss -ltn | grep :29500"),
    ("master", connect_error("dropped"), "FAIL", "a firewall drops", "--dport 29500"),
    ("master", connect_error("no route"), "FAIL", "no route", "ip route get h0"),
    ("master", connect_error("open"), "FAIL", "another program", "--port"),
    ("variables", variables.Facts({}), "OK", "no variable", ""),
    ("variables", variables.Facts({"NCCL_SOCKET_IFNAMES": "eth0"}), "WARN", "NCCL_SOCKET_IFNAME?", "NCCL_SOCKET_IFN"),
    ("variables", variables.Facts({"nccl_debug": "INFO"}), "WARN", "NCCL_DEBUG", "export NCCL_DEBUG=INFO"),
    ("variables", variables.Facts({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), "WARN", "slows", "unset TORCH_DIST"),
    ("variables", variables.Facts({"TORCH_DISTRIBUTED_DEBUG": "on"}), "FAIL", "OFF, INFO, DETAIL", "unset TORCH_DIST"),
    ("variables", variables.Facts({"NCCL_P2P_DISABLE": "1"}), "OK", "without an NVIDIA GPU", ""),
    ("variables", variables.Facts({"NCCL_P2P_DISABLE": "1"}, True), "WARN", "NVLink", "unset NCCL_P2P_DISABLE"),
    ("variables", variables.Facts({"NCCL_IB_DISABLE": "1"}, True, True), "WARN", "not used", "unset NCCL_IB_DISABLE"),
    ("variables", variables.Facts({"NCCL_IB_DISABLE": "1"}, True, False), "OK", "without InfiniBand", ""),
    ("variables", variables.Facts({"NCCL_BLOCKING_WAIT": "1"}, True), "WARN", "is now TORCH_NCCL", "export TORCH_NCCL"),
    ("variables", variables.Facts({"GLOO_SOCKET_IFNAME": " eth0"}), "WARN", "spaces or quotes", "IFNAME=eth0"),
    ("variables", variables.Facts({"NCCL_OF_TOMORROW": "1"}), "UNKNOWN", "knows no variable", ""),
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
    ("collective", collective.Facts((tried(),)), "OK", "2 ranks meet over gloo", ""),
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
        "and do so otherwise",
        "export NCCL_P2P_DISABLE=1",
    ),
    (
        "collective",
        collective.Facts((tried(ranks=[RankTried(n, "", 0.1, 0.4 if n == 2 else 0.08, 0.01) for n in range(4)]),)),
        "WARN",
        "rank 2 is a straggler",
        "top",
    ),
    ("gpus", gpus.Facts("no NVIDIA driver here"), "OK", "no NVIDIA driver", ""),
    ("gpus", gpus.Facts("an NVIDIA driver is here, and NVML is not: pip install nvidia-ml-py"), "UNKNOWN", "NVML", ""),
    ("gpus", gpus.Facts("", (GPU, GPU), nproc=2), "OK", "2 in all", ""),
    ("gpus", gpus.Facts("", (GPU,), nproc=2), "FAIL", "two ranks on one GPU", "--nproc 1"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", mode=2),)), "FAIL", "PROHIBITED", "-c DEFAULT"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", mode=3, processes=(7,)),)), "FAIL", "EXCLUSIVE", "-c DEFAULT"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", uncorrected=3),)), "FAIL", "3 uncorrected", "nvidia-smi"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", processes=(7, 9), used=GIB),)), "WARN", "7, 9 already", "ps -fp 7 9"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", slowed=True),)), "WARN", "lowers the clock", "PERFORMANCE"),
    ("gpus", gpus.Facts("", (GPU, GPU), ((0, 1),), nproc=2), "WARN", "0-1 have no peer-to-peer", "topo"),
    ("gpus", gpus.Facts("", (GPU,), xid=("Xid (PCI:0000:07:00): 79",)), "WARN", "79", "nvidia-smi"),
]


@pytest.mark.parametrize(("name", "facts", "status", "why", "fix"), SEEN)
def test_a_check_says(name: str, facts: Any, status: str, why: str, fix: str) -> None:
    """The facts have been through JSON, as those of another machine."""
    check = checks.load(name)
    kind = check.Facts
    if checks.is_measured(name):
        found = check.judge(from_json(kind, as_json(facts)))
    else:
        each: Mapping[str, Any] = facts if isinstance(facts, dict) else {"h0": facts}
        found = check.judge({host: from_json(kind, as_json(seen)) for host, seen in each.items()})
    worst = max(found, key=lambda one: ("OK", "UNKNOWN", "WARN", "FAIL").index(one.status))
    assert worst.status == status, found
    assert why in worst.why and fix in worst.fix, worst
    assert bool(worst.fix) == (status in ("WARN", "FAIL")), worst


def test_every_check_is_judged_well_and_badly() -> None:
    for name in checks.names():
        seen = {status for check, _, status, _, _ in SEEN if check == name}
        assert "OK" in seen and seen & {"WARN", "FAIL"}, name


@pytest.mark.parametrize(
    ("backend", "machines_", "expected"),
    [
        ("gloo", 1, [{"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "lo"}]),
        ("gloo", 2, [{"GLOO_SOCKET_IFNAME": "eth0"}]),
    ],
)
def test_the_settings_that_are_tried(backend: str, machines_: int, expected: list[dict[str, str]]) -> None:
    assert collective.candidates(["eth0", "lo"], backend, machines_) == expected
    with_gpus = collective.candidates(["eth0", "lo"], "nccl", machines_)
    assert {"NCCL_P2P_DISABLE": "1"} in with_gpus and {"NCCL_IB_DISABLE": "1"} in with_gpus


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0,eth1", "eth1", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=docker0", "docker01", True),
    ],
)
def test_nccls_pattern(pattern: str, name: str, fits: bool) -> None:
    assert interfaces.matches(pattern, name) is fits
