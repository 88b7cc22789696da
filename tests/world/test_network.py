"""Interfaces and addresses of this machine, as they are."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from budget import budget
from samestep.errors import UserError
from samestep.launch import Machines, rendezvous_address
from samestep.message import Message
from samestep.world import network


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert network.route_to_host("127.0.0.1") == ("lo", "127.0.0.1")
    assert network.is_this_machine("localhost") and not network.is_this_machine("203.0.113.7")


def test_a_loopback_that_is_down_is_named_with_the_line_that_sets_it_up() -> None:
    network.check_loopback()
    code = "import samestep.report.language; from samestep.world import network; network.check_loopback()"
    check = f"{sys.executable} -c '{code}'"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode or shutil.which("ip") is None:
        pytest.skip("no network namespace without root, or no command ip")
    down = subprocess.run(["unshare", "-n", "sh", "-c", check], capture_output=True, text=True, timeout=budget())
    assert down.returncode == 1
    # The sentence ends in the line to type.
    line = down.stderr.strip().rpartition(": ")[2]
    assert line.startswith("ip link")
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
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert network.choose(chosen, "127.0.0.1") is None
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_nccl_is_told_where_the_way_leads_outside() -> None:
    env: dict[str, str] = {}
    every = [ipaddress.ip_address(address) for entries in network.interfaces().values() for address in entries]
    outside = [str(address) for address in every if not (address.is_loopback or address.is_link_local)]
    if not outside:
        assert "CI" not in os.environ, "this machine has no address but its loopback's"
        pytest.skip("this machine has no address but its loopback's")
    said = network.choose(env, outside[0])
    assert said is not None and said.id == "interface_is_chosen"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == said.fields["interface"]


def test_loopback_is_this_machine_and_no_master_of_many() -> None:
    assert network.is_this_machine("127.0.0.1") and network.is_this_machine("127.0.1.1")
    assert refused(lambda: network.check_master("0.0.0.0", 2)).id == "master_addr_names_no_machine"
    assert refused(lambda: network.addresses("a..b")).fields["name"] == "a..b"


def refused(call: Callable[[], object]) -> Message:
    with pytest.raises(UserError) as raised:
        call()
    return raised.value.message


def test_a_bad_name_is_refused_with_what_there_is() -> None:
    said = refused(lambda: network.check_interface("eth99"))
    assert said.id == "option_names_no_interface" and "lo" in said.fields["known"]
    said = refused(lambda: network.addresses("no-such-host.invalid"))
    assert (said.id, said.fields["name"]) == ("name_is_unknown", "no-such-host.invalid")
    said = refused(lambda: network.check_master("localhost", 2))
    assert said.id == "master_is_reached_by_no_other" and said.fields["address"] in ("127.0.0.1", "::1")
    network.check_master("localhost", 1)


def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = refused(lambda: rendezvous_address.check_port(Machines(port=port)))
        assert (said.id, said.fields["why"].id) == ("port_is_taken", "port_is_taken_by_process")
        assert said.fields["why"].fields["pid"] == os.getpid()
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
        assert refused(lambda: network.addresses(host, wait_s)).fields["name"] == host
        assert len(asked) == 1 or (variable and wait_s < 1)
