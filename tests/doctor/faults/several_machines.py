"""Faults of several machines and of the links between them, in hosts of their own network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from budget import budget, wait_until
from cluster.hosts import Hosts, ip, tc
from doctor.faults.fault import DOCTOR, SOURCE, clean, grouped
from samestep.doctor.token import TOKEN

SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 90;
    return failed;
}
"""
REACHED = """
import errno, socket, sys
probe = socket.socket()
probe.settimeout(1)
sys.exit(probe.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)
"""
Between = Callable[[int], Sequence[str]]


def doctors(
    hosts: Hosts,
    *,
    on: Sequence[int] = (0, 1),
    more: Between = lambda _: (),
    before: Between = lambda _: (),
    variables: Mapping[int, Mapping[str, str]] | None = None,
    folders: Mapping[int, str] | None = None,
    quick: bool = True,
    master: str = "h0",
    nnodes: int = 0,
) -> list[str]:
    """Types the same line on each host; returns what each printed. before: words that run the doctor."""
    started = []
    shape = ["--nnodes", str(nnodes or len(on)), "--nproc", "1", "--master-addr", master]
    shape += ["--timeout", f"{budget(10 if quick else 60):.0f}"]
    for host in on:
        line = [*before(host), *DOCTOR, *shape, *(["--quick"] if quick else []), *more(host)]
        environment = clean() | {TOKEN: "of the planted faults"} | dict((variables or {}).get(host, {}))
        where = (folders or {}).get(host)
        started.append(
            hosts.start(host, line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=where)
        )
    return [process.communicate()[0] for process in started]


def between_hosts(folder: Path) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    """Yields (name, probe, id of the finding, words of its fix, quick, how to run it) with the fault in place."""
    with Hosts(3) as hosts:
        spaces = [f"{hosts._tag}-{n}" for n in range(3)]
        two: Callable[[], list[str]] = lambda: doctors(hosts)  # noqa: E731
        yield from of_the_network(hosts, spaces, two)
        yield from of_one_machine(hosts, spaces, folder)


def of_the_network(
    hosts: Hosts, spaces: Sequence[str], two: Callable[[], list[str]]
) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    with shaped(spaces[1], "eth0", "300mbit"):
        yield "a link is slow one way", "links", "link_is_slow", "", True, two
    with shaped(spaces[1], "eth0", "100mbit"), shaped(f"{hosts._tag}-sw", "p1", "100mbit"):
        yield "a link of 100 Mbit/s", "links", "link_is_slow", "", True, two
        three = lambda: doctors(hosts, on=(0, 1, 2))  # noqa: E731
        yield "the one slow machine of three", "links", "machine_sends_slowly", "", True, three
    hosts.cut(1)
    yield "a link is cut", "master", "master_does_not_answer", "", True, two
    hosts.mend(1)
    reached = hosts.line(1, [sys.executable, "-c", REACHED, hosts.address(0)])
    wait_until(lambda: subprocess.run(reached).returncode == 0, "h1 does not reach h0 again")
    yield (
        "the first machine does not listen",
        "master",
        "master_refuses_connections",
        "",
        True,
        lambda: doctors(hosts, on=(1,), nnodes=2),
    )
    yield (
        "a machine is missing",
        "machines",
        "machines_have_not_connected",
        "",
        True,
        lambda: doctors(hosts, on=(0,), nnodes=2),
    )
    with rule(spaces[0], "ipproto tcp sport 29500 blackhole"):
        yield "the port is dropped", "master", "master_does_not_answer", "--dport 29500", True, two
    with rule(spaces[1], "ipproto tcp sport 32768-60999 dport 32768-60999 blackhole"):
        yield "random ports are dropped", "reachability", "machine_does_not_answer", "", True, two
    for port in ("p1", "p2"):
        bridge(f"{hosts._tag}-sw", port, "on")
    three = lambda: doctors(hosts, on=(0, 1, 2))  # noqa: E731
    yield "two of three do not reach each other", "reachability", "machine_does_not_answer", "", True, three
    for port in ("p1", "p2"):
        bridge(f"{hosts._tag}-sw", port, "off")
    ip(f"-n {spaces[1]} link set eth0 mtu 9000")
    yield "another MTU", "mtu", "mtu_differs_between_machines", "mtu 1500", True, two
    ip(f"-n {spaces[1]} link set eth0 mtu 1500")


def of_one_machine(
    hosts: Hosts, spaces: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    number = lambda host: ["--node-rank", str(min(host, 1))]  # noqa: E731
    run = lambda **how: lambda: doctors(hosts, **how)  # noqa: E731
    yield "a node rank twice", "machines", "node_rank_given_twice", "", True, run(on=(0, 1, 2), more=number)
    shape = lambda host: ["--nnodes", str(2 + host)]  # noqa: E731
    yield "another --nnodes", "machines", "nnodes_differs_between_machines", "", True, run(more=shape)
    shutil.copytree(SOURCE, folder / "src")
    with open(folder / "src" / "samestep" / "version.py", "a") as file:
        file.write("# another\n")
    changed = {1: {"PYTHONPATH": str(folder / "src")}}
    yield "another samestep", "versions", "ranks_have_incompatible_versions", "", True, run(variables=changed)
    for host in (0, 1):
        (folder / str(host)).mkdir()
        (folder / str(host) / "my_job.py").write_text(f"rows = {host}\n")
    folders_of = {host: str(folder / str(host)) for host in (0, 1)}
    job = lambda _: ["my_job.py"]  # noqa: E731
    yield (
        "another job file",
        "versions",
        "job_files_differ_between_machines",
        "",
        True,
        run(folders=folders_of, more=job),
    )
    (folder / "skew.c").write_text(SKEW)
    line = ["gcc", "-shared", "-fPIC", "-o", str(folder / "skew.so"), str(folder / "skew.c"), "-ldl"]
    subprocess.run(line, check=True)
    late = {1: {"LD_PRELOAD": str(folder / "skew.so")}}
    yield "a clock 90 s ahead", "clock", "clock_is_ahead", "", True, run(variables=late)
    for host in (0, 1):
        lines = [f"127.0.1.1 h{host}", "127.0.0.1 localhost", *([f"{hosts.address(0)} h0"] if host else [])]
        (folder / f"hosts{host}").write_text("\n".join(lines) + "\n")
    bind = lambda host: ["sh", "-c", f'mount --bind {folder}/hosts{host} /etc/hosts; exec "$@"', "sh"]  # noqa: E731
    second = lambda host: bind(1) if host else []  # noqa: E731
    yield "a hostname of 127.0.1.1", "hostname", "hostname_is_loopback", "IFNAME=eth0", True, run(before=second)
    first = lambda host: [] if host else bind(0)  # noqa: E731
    yield "the master of 127.0.1.1", "master", "master_is_loopback", "", True, run(before=first)
    yield (
        "the master's name is unknown",
        "master",
        "master_name_is_unknown",
        "",
        True,
        run(on=(1,), nnodes=2, master="h7"),
    )
    loop = {1: {"GLOO_SOCKET_IFNAME": "lo"}}
    yield "gloo uses lo", "interfaces", "chosen_interface_leads_to_no_machine", "IFNAME=eth0", True, run(variables=loop)
    some = {1: {"NCCL_ALGO": "Ring"}}
    yield "NCCL_ALGO on one machine", "variables", "variable_differs_between_machines", "", True, run(variables=some)
    for space in spaces[:2]:
        ip(f"-n {space} link add docker0 type bridge")
        ip(f"-n {space} addr add 172.17.0.1/16 dev docker0")
        ip(f"-n {space} link set docker0 up")
    docker = {host: {"GLOO_SOCKET_IFNAME": "docker0"} for host in (0, 1)}
    yield (
        "gloo uses docker0",
        "interfaces",
        "chosen_interface_leads_to_no_machine",
        "IFNAME=eth0",
        True,
        run(variables=docker),
    )
    tried = run(variables=docker, quick=False)
    yield (
        "ranks do not meet over docker0",
        "collective",
        "ranks_all_reduce_with_other_settings",
        "export GLOO_SOCKET_IFNAME=eth0",
        False,
        tried,
    )
    slow = grouped("cpu", "cpu.cfs_quota_us=25000")
    limited = lambda host: ["sh", "-c", slow, "sh"] if host else []  # noqa: E731
    yield "a straggler", "collective", "rank_is_a_straggler", "", False, run(before=limited, quick=False)
    with suppress(OSError):
        Path("/sys/fs/cgroup/cpu/samestep-doctor").rmdir()


@contextmanager
def shaped(space: str, device: str, rate: str) -> Iterator[None]:
    tc(f"-n {space} qdisc replace dev {device} root handle 1: htb default 1")
    tc(f"-n {space} class replace dev {device} parent 1: classid 1:1 htb rate {rate} burst 64kb")
    yield
    tc(f"-n {space} qdisc del dev {device} root")


@contextmanager
def rule(space: str, words: str) -> Iterator[None]:
    ip(f"-n {space} rule add pref 1 {words}")
    yield
    ip(f"-n {space} rule del pref 1")


def bridge(space: str, port: str, state: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, "bridge", "link", "set", "dev", port, "isolated", state], check=True)
