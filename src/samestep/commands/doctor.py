"""doctor: gathers facts on each machine, has the doctor's probes judge them, and reports on the first machine.

The first machine listens on the port of the rendezvous. The others connect, send their facts, and then do what the
first one requests: open connections, send, start ranks. One that cannot connect judges itself, and says why it could
not.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from samestep import launch
from samestep.commands.ask_worker import ask_probes
from samestep.commands.command_options import DoctorOptions
from samestep.commands.machines import detect_launched_rank, machines_of
from samestep.commands.options import arguments
from samestep.commands.setup import Setup
from samestep.doctor import fleet
from samestep.doctor import token as tokens
from samestep.doctor.connection import Lost, why_out_of_bounds
from samestep.doctor.machine import DEVICE, LaunchInfo, Machine
from samestep.doctor.probe import Finding, FleetProbe, MachineProbe, Probe, Status, fail, unknown
from samestep.doctor.probes import PROBES
from samestep.doctor.probes.installation import TorchBuild
from samestep.doctor.records import Probed, ProbeQuestion, Report
from samestep.doctor.token import TOKEN
from samestep.errors import TrainingFailed, UserError, say
from samestep.launch import Machines, Shape
from samestep.launch.outer_launcher import LaunchedRank
from samestep.launch.rendezvous_address import rendezvous_of
from samestep.message import Message, message
from samestep.records.files import as_json, from_json
from samestep.report.language import text
from samestep.report.terminal import Terminal, cell
from samestep.world import RENDEZVOUS_PORT, network, nvidia
from samestep.world.imports import module_arguments
from samestep.world.processes import wait_for

WORKER_S = 120.0  # in which torch and the engines' packages are imported
APART = 53  # from an outer launcher's MASTER_PORT, which its own store holds, to the doctor's port
NOT_CONNECTED = ("machines", "master")  # the probes that judge again where the machines have not met
COLOURS = {"FAIL": "red", "WARN": "yellow", "UNKNOWN": "dim", "OK": "green"}
ORDER: tuple[Status, ...] = ("FAIL", "WARN", "UNKNOWN", "OK")


@dataclass(frozen=True)
class Role:
    """What this command does in the doctor. first: it reports. idle: nothing, because another process probes this
    machine. wait_s: how long machines wait for each other. token: that they share."""

    info: LaunchInfo
    token: str = ""
    first: bool = True
    idle: bool = False
    wait_s: float = 120.0


def doctor(options: DoctorOptions, flags: Sequence[str] = ()) -> Report | int | None:
    """Returns the report; on another machine than the first its exit code; None on the other ranks of a machine.

    flags: how to print the report, for the command that a launcher starts on each machine.
    """
    if not DEVICE.fullmatch(options.device):
        raise UserError(message("device_is_none", device=options.device))
    setup = options.setup()
    if setup.launchers:
        return _start_launcher(setup, options, flags)
    role = _role(replace(setup, nproc=None, launchers=()), setup.nproc, options.job)
    if role.idle:
        return None
    role = replace(role, token=role.token or _token(options, role.info.nnodes, role.first, role.info.master))
    began = time.monotonic()
    probes = [probe for probe in PROBES.values() if not (options.quick and probe.needs_torch)]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(_probe_in_worker, role.info, probes)
        if not role.first:
            return _join(role, began, [*_probe_this_process(role.info, probes), *worker.result()])
        gather = lambda: [*_probe_this_process(role.info, probes, done=("port",)), *worker.result()]  # noqa: E731
        return _lead(role, began, probes, gather)


def _role(setup: Setup, nproc: int | None, job: str) -> Role:
    """Returns what this command does, by the options and the environment."""
    options = setup.machines
    info = LaunchInfo(
        nproc=nproc or 2,
        nnodes=options.max_nnodes or 1,
        node=options.node_rank,
        master=options.master_addr or Machines().master,
        port=options.port,
        out=str(setup.out or Path("runs")),
        job=job,
        device=setup.device,
        prefixes=tuple(environment.prefix for environment in launch.environments().values()),
    )
    try:
        rank = None if nproc or options.nnodes else detect_launched_rank(os.environ, setup)
    except UserError as error:
        return Role(replace(info, nnodes=1, master=Machines().master, contradiction=text(error.message, "en")))
    if rank:
        return _role_of_rank(info, rank, os.environ, options.timeout_s)
    nproc = nproc or nvidia.visible() or 2
    try:
        machines = machines_of(setup, os.environ)
    except UserError:
        if info.nnodes > 1 and options.master_addr and _is_loopback_or_unknown(options.master_addr):
            info = replace(info, nproc=nproc, port=info.port or RENDEZVOUS_PORT)
            return Role(info, wait_s=0.0)  # the probe `master` reports it
        raise
    info = replace(info, nproc=nproc, nnodes=machines.nnodes, node=machines.node_rank, master=machines.master)
    first = machines.nnodes == 1 or machines.is_master
    return Role(replace(info, port=machines.port), first=first, wait_s=machines.timeout_s)


def _role_of_rank(info: LaunchInfo, rank: LaunchedRank, env: Mapping[str, str], wait_s: float) -> Role:
    """Returns the role of a rank that an outer launcher has started: one rank on each machine probes it.

    Its token is that of the environment. Without one it is the launch's name, which keeps launches apart and is no
    secret.
    """
    nnodes = -(-rank.size // rank.local_size)
    info = replace(info, nproc=rank.local_size, nnodes=nnodes, node=None, started_by=rank.launcher)
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and (
        rank.init_method.startswith("tcp:") or "MASTER_PORT" in env
    ):
        ranks_host, ranks_port = rendezvous_of(rank.init_method, env)
        info = replace(info, ranks_host=ranks_host, ranks_port=ranks_port)
    token = tokens.given(env)
    if nnodes > 1:
        host, port = rendezvous_of(rank.init_method, env)
        near = port + APART if port + APART < 65536 else port - APART
        info = replace(info, master=host, port=near)
        if not token and rank.rank == 0:
            fields = {"launcher": rank.launcher, "variable": TOKEN, "port": near, "host": host}
            say(message("machines_are_not_authenticated", **fields))
    token = token or f"the launch {rank.launcher} {rank.id}"
    return Role(info, token, first=rank.rank == 0, idle=rank.local_rank != 0, wait_s=wait_s)


def _token(options: DoctorOptions, nnodes: int, first: bool, master: str) -> str:
    """Returns the token of this doctor. Without one in the environment the first machine makes one, and prints the line
    for the others."""
    token = tokens.given(os.environ)
    if token or nnodes == 1:
        return token or tokens.new()
    if not first:
        raise UserError(message("machine_has_no_token", variable=TOKEN, master=master))
    token = tokens.new()
    words = arguments(options, DoctorOptions, ("node_rank",)) + [options.job] * bool(options.job)
    number = " --node-rank N" if options.machines.node_rank is not None else ""
    line = f"{TOKEN}={token} samestep doctor {shlex.join(words)}{number}"
    say(message("line_for_each_other_machine", line=line))
    return token


def _start_launcher(setup: Setup, options: DoctorOptions, flags: Sequence[str]) -> int:
    """Starts this command with a launcher, as `run` would start its ranks; one rank on each machine probes it."""
    machines = machines_of(setup, os.environ)
    name = setup.launchers[0]
    module = launch.load(name)
    if why := module.missing(machines, os.environ):
        raise UserError(message("launcher_cannot_be_used_here", launcher=name, why=why))
    more = [options.job] * bool(options.job) + ["--device", setup.device, *flags] + ["--quick"] * options.quick
    more += ["--out", str(setup.out)] if setup.out else []
    first = machines.nnodes == 1 or machines.single_launch or machines.is_master
    token = _token(options, 1 if machines.single_launch else machines.nnodes, first, machines.master)
    machines = replace(machines, exported=(TOKEN,))
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as folder:
        program = (*module_arguments("samestep"), "doctor", *more)
        command = module.plan(program, Shape(setup.nproc or 2, folder, machines))
        started = subprocess.Popen(command.argv, env=os.environ | dict(command.env) | {TOKEN: token})
        return wait_for(started, message("doctors_are_running", launcher=name))


def _is_loopback_or_unknown(master: str) -> bool:
    """Returns whether a name is unknown here, or leads to this machine alone."""
    try:
        return any(address.startswith("127.") or address == "::1" for address in network.addresses(master))
    except UserError:
        return True


def _probe_this_process(info: LaunchInfo, probes: Sequence[Probe], done: Sequence[str] = ()) -> list[Probed]:
    """Gathers the facts of this machine that need no torch."""
    local = [probe.name for probe in probes if isinstance(probe, MachineProbe) and not probe.in_worker]
    return [Probed.on_this_machine(name, info) for name in local if name not in done]


def _probe_in_worker(info: LaunchInfo, probes: Sequence[Probe]) -> list[Probed]:
    names = tuple(probe.name for probe in probes if isinstance(probe, MachineProbe) and probe.in_worker)
    if not names:
        return []
    try:
        return list(ask_probes(ProbeQuestion(info, names), WORKER_S).probed)
    except (TrainingFailed, UserError) as error:  # a torch that does not import ends the worker
        # The worker's last line is its exception; there is none where it has taken too long.
        why = str(error.message.fields.get("last_line") or text(error.message, "en"))
        facts = {"torch_build": as_json(TorchBuild(why))}
        return [Probed(name, facts.get(name), "" if name in facts else why) for name in names]


def _join(role: Role, began: float, probed: list[Probed]) -> Report | int:
    """Runs on each machine but the first. Where it cannot connect to the first one, judges this machine alone."""
    connection, machine, dialled = fleet.connect(role.info, probed, role.wait_s, role.token)
    try:
        code = fleet.serve(connection, machine, role.info) if connection else None
    finally:
        machine.close()
    if code is not None:
        say(message("report_is_on_the_first_machine", master=role.info.master))
        return code
    master = Probed.on_this_machine("master", replace(role.info, connect_error=dialled))
    probed = [gathered for gathered in probed if gathered.probe not in NOT_CONNECTED] + [master]
    return report_of([(machine.name, probed)], {}, began)


def _lead(role: Role, began: float, probes: Sequence[Probe], gather: Callable[[], list[Probed]]) -> Report:
    """Runs on the first machine: waits for the others, has them measure, judges, and stops them."""
    info, probed = role.info, [Probed.on_this_machine("port", role.info)]
    listening = _listening(info) if info.nnodes > 1 and role.wait_s else None
    arriving = fleet.Arrivals(listening, role.token) if listening else None
    probed += gather()
    connected = arriving.wait(info.nnodes - 1, role.wait_s) if arriving else []
    if arriving and arriving.strangers:
        say(message("stranger_is_not_let_in", address=arriving.strangers[-1], variable=TOKEN))
    route = network.route_to(info.master)
    first = fleet.LocalMachine(socket.gethostname(), route[1] if route else "127.0.0.1", info, role.token)
    remote = fleet.remote_machines(first, connected)
    greetings = {id(connection): greeting for connection, greeting in connected}
    code = 1
    try:
        facts = [(first.name, probed)]
        facts += [(machine.name, list(greetings[id(machine.connection)].probed)) for machine in remote]
        report = report_of(facts, _measure(first, remote, info, probes), began)
        code = int(report.failed)
        return report
    finally:
        for machine in remote:
            machine.stop(code)
        first.close()
        if arriving:
            arriving.close()


def _listening(info: LaunchInfo) -> socket.socket | None:
    """Opens the port of the rendezvous; None where it is taken, as the probe `port` says."""
    try:
        return network.bound(info.master, info.port)
    except OSError:
        return None


def _measure(
    first: fleet.LocalMachine, remote: Sequence[fleet.RemoteMachine], info: LaunchInfo, probes: Sequence[Probe]
) -> dict[str, object]:
    """Gathers the facts of the probes of all machines together: probe -> its facts, or the error."""
    machines: tuple[Machine, ...] = (first, *remote)
    measured: dict[str, object] = {}
    lost: ConnectionError | None = None
    try:
        ports = tuple((machine.address, machine.listen()) for machine in machines)
        for machine in remote:
            machine.meet(ports)
    except ConnectionError as error:
        lost = error
    for probe in probes:
        if isinstance(probe, FleetProbe):
            try:
                measured[probe.name] = lost or probe.gather(machines, info)
            except Exception as error:
                measured[probe.name] = error
    return measured


def report_of(probed: Sequence[tuple[str, Sequence[Probed]]], measured: Mapping[str, object], began: float) -> Report:
    """Has each probe judge its facts. probed: (machine, its facts). measured: as _measure returns it."""
    judged: list[Finding] = []
    facts: dict[str, object] = {}
    for probe in PROBES.values():
        findings: list[Finding] = []
        if isinstance(probe, MachineProbe):
            findings, plain = _judge_machines(probe, probed)
            facts |= {probe.name: plain} if plain else {}
        elif isinstance(error := measured.get(probe.name), Exception):
            why = message("probe_was_not_measured", error=error.message if isinstance(error, Lost) else str(error))
            findings = fail(why) if isinstance(error, ConnectionError) else unknown(why)
        elif probe.name in measured:
            findings, facts[probe.name] = _judge(probe, measured[probe.name]), as_json(measured[probe.name])
        judged += [replace(finding, probe=probe.name, group=probe.group) for finding in findings]
    return Report(tuple(machine for machine, _ in probed), tuple(judged), time.monotonic() - began, facts)


def _judge_machines(
    probe: MachineProbe[Any], probed: Sequence[tuple[str, Sequence[Probed]]]
) -> tuple[list[Finding], dict[str, object]]:
    """Has a probe judge the facts of all machines that have them. Returns the facts too, as plain values."""
    findings, facts, plain = list[Finding](), {}, {}
    answers = [(machine, answer) for machine, rows in probed for answer in rows if answer.probe == probe.name]
    for machine, answer in answers:
        error: Message | str | None = answer.error
        if not error:
            try:
                gathered = from_json(probe.facts, answer.facts, f"what {machine} says")
                error = why_out_of_bounds(as_json(gathered))
            except UserError as refused:
                error = refused.message
        if error:
            findings.append(Finding("UNKNOWN", message("probe_has_no_facts", error=error), machine=machine))
        else:
            facts[machine], plain[machine] = gathered, answer.facts
    return findings + (_judge(probe, facts) if facts else []), plain


def _judge(probe: Probe, facts: Any) -> list[Finding]:
    """Has a probe judge its facts; what another machine says of itself may be of the right types and make no sense."""
    try:
        return probe.judge(facts)
    except Exception as error:
        return unknown(message("probe_was_not_judged", error=f"{type(error).__name__}: {error}"))


def show_report(report: Report, *, complete: bool = False) -> None:
    """Prints a table of what is wrong, and the lines that fix it. complete: also what is right."""
    console = Terminal(soft_wrap=False)
    findings = [finding for finding in report.findings if complete or finding.status != "OK"]
    several = len(report.machines) > 1
    if findings:
        console.print(_table(findings, several))
    fixes = {finding.fix: finding for finding in reversed(findings) if finding.fix}
    if fixes:
        console.show_line("")
        console.show_line(text(message("lines_to_paste")), "bold")
        for fix, finding in reversed(fixes.items()):
            where = f" @ {finding.machine}" if several and finding.machine else ""
            console.show_line(f"  # {finding.probe}{where}", "dim")
            console.show_line(f"  {fix}")
    console.show_line("")
    console.show_line(text(summary(report)), "bold")


def _table(findings: Sequence[Finding], several: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = [message("heading_probe"), *([message("heading_machine")] if several else []), message("heading_found")]
    for column in ("", *map(text, headings)):
        table.add_column(column, overflow="fold")
    for finding in sorted(findings, key=lambda finding: ORDER.index(finding.status)):
        cells = [cell(finding.status, style=COLOURS[finding.status]), cell(finding.probe)]
        table.add_row(*cells, *([cell(finding.machine)] if several else []), cell(text(finding.why)))
    return table


def summary(report: Report) -> Message:
    """Returns '21 OK, 1 WARN on 2 machines in 9.1 s'."""
    counts = Counter(finding.status for finding in report.findings)
    counted = [f"{counts[status]} {status}" for status in reversed(ORDER) if counts[status]]
    machines = len(report.machines) if len(report.machines) > 1 else None
    return message("machines_are_diagnosed", findings=counted, machines=machines, seconds=report.seconds)
