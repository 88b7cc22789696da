"""Probes of the launch: the launchers' variables, the machines that have connected, the master and its port."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, MachineProbe, differences, fail, for_each, ok, quoted, warn
from samestep.errors import UserError
from samestep.message import message
from samestep.world import RENDEZVOUS_PORT, network
from samestep.world.network import Dialled, Outcome

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchVariables:
    """The launchers' environment variables, on one machine.

    contradiction: the sentence of the error; '' for none. stale: the variables of RANKS and RENDEZVOUS that are set
    though no launcher has started this command. started_by: the launcher; '' without one. outer: the names of
    launchers' variables that are set.
    """

    contradiction: str
    stale: Mapping[str, str] = field(default_factory=dict)
    started_by: str = ""
    outer: tuple[str, ...] = ()


def read_launch_variables(info: LaunchInfo) -> LaunchVariables:
    variables = {name: os.environ[name] for name in (*RANKS, *RENDEZVOUS) if name in os.environ}
    outer = tuple(sorted(name for name in os.environ if name.startswith(info.prefixes)))
    return LaunchVariables(info.contradiction, variables if not info.started_by else {}, info.started_by, outer)


def judge_launch_variables(variables: LaunchVariables) -> list[Finding]:
    stale_ranks = [name for name in variables.stale if name in RANKS]
    findings = []
    port = variables.stale.get("MASTER_PORT", "1")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        findings += fail(message("master_port_is_no_port", port=port), f"export MASTER_PORT={RENDEZVOUS_PORT}")
    elif variables.contradiction:
        lacking = re.search(r"\(no ([A-Z]+_)", variables.contradiction)  # one of a launcher's: its others are stale
        stale = [name for name in variables.outer if lacking and name.startswith(lacking[1])] or stale_ranks
        why = message("launcher_variables_contradict", why=variables.contradiction)
        return fail(why, f"unset {' '.join(map(quoted, stale))}" if stale else "")
    if stale_ranks:
        values = [f"{name}={variables.stale[name]}" for name in stale_ranks]
        findings += warn(
            message("launcher_variables_are_stale", variables=values), f"unset {' '.join(map(quoted, variables.stale))}"
        )
    if findings:
        return findings
    if variables.started_by:
        return ok(message("started_by_launcher", launcher=variables.started_by))
    return ok(message("no_launcher_variables"))


@dataclass(frozen=True)
class LaunchOptions:
    """The options of the launch, as one machine was given them. node: its --node-rank; None where none was given."""

    node: int | None
    nnodes: int
    nproc: int
    master: str
    started_by: str


def read_launch_options(info: LaunchInfo) -> LaunchOptions:
    return LaunchOptions(info.node, info.nnodes, info.nproc, info.master, info.started_by)


def judge_machines(options: Mapping[str, LaunchOptions]) -> list[Finding]:
    """Judges whether each machine of the launch has connected, once, with the same --nnodes and --nproc."""
    findings: list[Finding] = []
    first = next(iter(options.values()))
    if values := differences(options, lambda machine: machine.nnodes):
        findings += fail(message("nnodes_differs_between_machines", values=values), "# the same command on each")
    if values := differences(options, lambda machine: machine.nproc):
        findings += warn(message("nproc_differs_between_machines", values=values), f"--nproc {first.nproc}   # on each")
    numbers: dict[int, list[str]] = {}
    for name, machine in options.items():
        if machine.node is not None:
            numbers.setdefault(machine.node, []).append(name)
    for number, names in numbers.items():
        if len(names) > 1:
            free = next((candidate for candidate in range(first.nnodes) if candidate not in numbers), first.nnodes)
            why = message("node_rank_given_twice", machines=names, node_rank=number)
            findings += fail(why, f"--node-rank {free}   # on {names[-1]}")
    connected, expected = len(options), first.nnodes
    if connected < expected and not any(finding.status == "FAIL" for finding in findings):
        missing = [number for number in range(expected) if number not in numbers] if numbers else []
        findings += fail(
            message("machines_have_not_connected", connected=connected, expected=expected, missing=missing),
            "# run the same command on each machine; there it says what is wrong",
        )
    return findings or ok(message("machines_have_connected", connected=connected, expected=expected, nproc=first.nproc))


@dataclass(frozen=True)
class Master:
    """How one machine sees the master.

    addresses: of the master; empty: the name is unknown here. connect_error: how the last attempt to connect to the
    rendezvous ended, where the machines have not met; None where they have, or where this machine is the master.
    """

    host: str
    master: str
    port: int
    nnodes: int
    addresses: tuple[str, ...]
    connect_error: Dialled | None


def look_up_master(info: LaunchInfo) -> Master:
    try:
        addresses = tuple(network.addresses(info.master))
    except UserError:
        addresses = ()
    return Master(
        host=socket.gethostname(),
        master=info.master,
        port=info.port,
        nnodes=info.nnodes,
        addresses=addresses,
        connect_error=info.connect_error,
    )


def judge_master(lookup: Master) -> list[Finding]:
    name, host = lookup.master, lookup.host
    if not lookup.addresses:
        fix = f"echo ADDRESS {quoted(name)} >> /etc/hosts   # or: --master-addr ADDRESS"
        return fail(message("master_name_is_unknown", master=name, host=host), fix)
    if lookup.nnodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in lookup.addresses):
        return fail(
            message("master_is_loopback", master=name, address=lookup.addresses[0], host=host),
            "--master-addr ADDRESS   # the one by which the others reach it: hostname -I",
        )
    if lookup.connect_error is None:
        return ok(message("master_has_addresses", master=name, addresses=lookup.addresses))
    return _judge_connection(lookup.connect_error.outcome, name, lookup.port)


def _judge_connection(outcome: Outcome, master: str, port: int) -> list[Finding]:
    """Says why the rendezvous is not reached."""
    match outcome:
        case "open":
            why = message("no_doctor_answers_at_master", master=master, port=port)
            fix = "# another --port, the same on each machine; the same samestep on each"
        case "refused":
            why = message("master_refuses_connections", master=master, port=port)
            fix = f"ss -ltn | grep :{port}   # on {master}: start the same line there first; else open the port in its "
            fix += "firewall"
        case "dropped":
            why = message("master_does_not_answer", master=master, port=port)
            fix = f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT   # on {master}; ping {master} from here"
        case "no route":
            why = message("no_route_to_master", master=master, port=port)
            fix = f"ip route get {quoted(master)}   # then --master-addr with an address of a network that both have"
        case _:  # a name that was known a moment ago, or another error
            why = message("connection_to_master_failed", master=master, port=port)
            fix = f"ping {quoted(master)}"
    return fail(why, fix)


@dataclass(frozen=True)
class RendezvousPort:
    """The port of the rendezvous, on the machine where the ranks meet.

    port: 0 where none was given, or the port is another machine's. error: why it cannot be opened; '' where it can.
    pid, process: the process that has it; 0 where that is unknown. started_by: the launcher whose ranks would open it;
    '' for samestep's own. free: another port that is free; 0 where none is needed.
    """

    port: int
    error: str = ""
    pid: int = 0
    process: str = ""
    started_by: str = ""
    free: int = 0


def try_port(info: LaunchInfo) -> RendezvousPort:
    # The ranks of an outer launcher open another port than this doctor.
    host, port = (info.ranks_host, info.ranks_port) if info.started_by else (info.master, info.port)
    try:
        if not port or not network.is_this_machine(host):
            return RendezvousPort(0)
        error = network.bind_error(host, port)
        if error is None:
            return RendezvousPort(port)
        with network.bound(host, 0) as listening:
            free = int(listening.getsockname()[1])
    except (UserError, OSError):  # the name is unknown: the probe `master` says so
        return RendezvousPort(0)
    pid, process = network.holder_of(port) or (0, "")
    words = error.strerror or str(error)
    return RendezvousPort(port, words, pid, process=process, started_by=info.started_by, free=free)


def judge_port(tried: RendezvousPort) -> list[Finding]:
    port = tried.port
    if not tried.error:
        return ok(message("port_is_free", port=port) if port else message("no_port_of_this_machine"))
    if tried.error == "Permission denied":
        why = message("port_cannot_be_opened", port=port, error=tried.error)
    elif tried.pid:
        why = message("port_is_taken_by_process", port=port, pid=tried.pid, process=tried.process)
    else:
        why = message("port_is_taken_by_another_user", port=port)
    if tried.started_by:
        return fail(why, f"export MASTER_PORT={tried.free}   # for all ranks of {tried.started_by}")
    return fail(why, "samestep run … --port 0   # any free one; several machines: the same other port on each")


PROBES = (
    MachineProbe(
        name="launch_variables",
        group="launch",
        facts=LaunchVariables,
        gather=read_launch_variables,
        judge=for_each(judge_launch_variables),
    ),
    MachineProbe(
        name="machines", group="launch", facts=LaunchOptions, gather=read_launch_options, judge=judge_machines
    ),
    MachineProbe(name="master", group="launch", facts=Master, gather=look_up_master, judge=for_each(judge_master)),
    MachineProbe(name="port", group="launch", facts=RendezvousPort, gather=try_port, judge=for_each(judge_port)),
)
