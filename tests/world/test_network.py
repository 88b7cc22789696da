"""Interfaces and addresses of this machine, as they are."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from budget import budget
from samestep.errors import UserError
from samestep.launch import Machines, rendezvous_address
from samestep.world import network


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert network.route_to_host("127.0.0.1") == ("lo", "127.0.0.1")
    assert network.is_this_machine("localhost") and not network.is_this_machine("203.0.113.7")


def test_a_loopback_that_is_down_is_named_with_the_line_that_sets_it_up() -> None:
    network.check_loopback()
    check = f"{sys.executable} -c 'from samestep.world import network; network.check_loopback()'"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode or shutil.which("ip") is None:
        pytest.skip("no network namespace without root, or no command ip")
    down = subprocess.run(["unshare", "-n", "sh", "-c", check], capture_output=True, text=True, timeout=budget())
    assert down.returncode == 1
    line = down.stderr.strip().rpartition("type: ")[2]
    assert line == "ip link set lo up"
    up = subprocess.run(["unshare", "-n", "sh", "-c", f"{line}; {check}"], capture_output=True, timeout=budget())
    assert up.returncode == 0, up.stderr


def test_an_interface_that_the_environment_names_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    network.check_loopback()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    with pytest.raises(UserError, match="nope0"):
        network.check_loopback()


def test_gloo_is_told_and_what_the_user_set_stays() -> None:
    env: dict[str, str] = {}
    assert network.choose(env, "127.0.0.1") is None
    assert env == {"GLOO_SOCKET_IFNAME": "lo"}
    mine = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert network.choose(mine, "127.0.0.1") is None
    assert mine == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_nccl_is_told_where_the_way_leads_outside() -> None:
    env: dict[str, str] = {}
    every = [ipaddress.ip_address(address) for entries in network.interfaces().values() for address in entries]
    outside = [str(address) for address in every if not (address.is_loopback or address.is_link_local)]
    if not outside:
        assert "CI" not in os.environ, "this machine has no address but its loopback's"
        pytest.skip("this machine has no address but its loopback's")
    said = network.choose(env, outside[0])
    assert said is not None
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] in said


def test_loopback_is_this_machine_and_no_master_of_many() -> None:
    assert network.is_this_machine("127.0.0.1") and network.is_this_machine("127.0.1.1")
    with pytest.raises(UserError, match=r"0\.0\.0\.0 names no machine"):
        network.check_master("0.0.0.0", 2)
    with pytest.raises(UserError, match=r"the name a\.\.b is unknown"):
        network.addresses("a..b")


def test_bad_names_are_one_sentence() -> None:
    with pytest.raises(UserError, match=r"--interface eth99: this machine has .*lo"):
        network.check_interface("eth99")
    with pytest.raises(UserError, match=r"the name no-such-host\.invalid is unknown on"):
        network.addresses("no-such-host.invalid")
    with pytest.raises(UserError, match=r"localhost is (127\.0\.0\.1|::1) on .*no other machine can reach .*--master"):
        network.check_master("localhost", 2)
    network.check_master("localhost", 1)


def test_a_taken_port_names_its_holder() -> None:

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"port {port} is taken by process \d+ \(.+\); choose another, or --port 0"
        ):
            rendezvous_address.check_port(Machines(port=port))
    rendezvous_address.check_port(Machines(port=rendezvous_address.free_port("127.0.0.1")))


@pytest.mark.parametrize(
    ("variable", "late", "wait_s", "host", "known"),
    [
        ("KUBERNETES_SERVICE_HOST", 2, 30, "pod-0.training", True),
        ("SLURM_JOB_ID", 2, 30, "n1", True),
        ("SLURM_JOB_ID", 10**6, 0.3, "n1", False),  # until --timeout
        ("SLURM_JOB_ID", 10**6, 10**6, "a..b", False),  # no name
        ("", 2, 10**6, "mistyped", False),  # outside of clusters at once
    ],
)
def test_a_masters_name_may_come_late_in_a_cluster(
    variable: str, late: int, wait_s: float, host: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: how often the name is not known yet."""
    asked = []

    def resolve(name: str, *given: Any, **named: Any) -> list[Any]:
        asked.append(name)
        if name == "a..b" or len(asked) <= late:
            return list(real(f"no-such-host.{'.' * (name == 'a..b')}invalid", *given, **named))
        return list(real("127.0.0.1", *given, **named))

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in network.CLUSTERS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "7")
    if known:
        assert network.addresses(host, wait_s) == ["127.0.0.1"] and len(asked) == 3
    else:
        with pytest.raises(UserError, match=f"the name {host} is unknown"):
            network.addresses(host, wait_s)
        assert len(asked) == 1 or (variable and wait_s < 1)
