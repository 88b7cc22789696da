"""doctor: gathers facts on each machine, judges them by the checks of world/checks, and reports on the first machine.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from samestep import launch
from samestep.commands import arrivals, fleet
from samestep.commands.ask_worker import ask_probes
from samestep.commands.authenticated_connection import check_bounds
from samestep.commands.doctor_options import DEVICE, DoctorOptions
from samestep.commands.machines import detect_launched_rank, machines_of
from samestep.commands.options import arguments
from samestep.commands.setup import Setup
from samestep.errors import TrainingFailed, UserError, printable, say
from samestep.launch import Machines, Shape
from samestep.launch.init_method import rendezvous_of
from samestep.launch.started_by import LaunchedRank
from samestep.records.doctor import Judged, Probed, ProbeQuestion, Report
from samestep.records.files import as_json, from_json
from samestep.world import RENDEZVOUS_PORT, checks, network, nvidia
from samestep.world import token as tokens
from samestep.world.checks import Finding, LaunchInfo, torch_build
from samestep.world.imports import module_arguments
from samestep.world.machine import Machine
from samestep.world.processes import wait_for
from samestep.world.token import TOKEN

WORKER_S = 120.0  # in which torch and the engines' packages are imported
APART = 53  # from an outer launcher's MASTER_PORT, which its own store holds, to the doctor's port
NOT_CONNECTED = ("machines", "master")  # judged again where the machines have not met


@dataclass(frozen=True)
class Role:
    """What this command does in the doctor. first: it reports. idle: nothing, because another process checks this
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
        raise UserError(f"--device {options.device}: give auto, cpu, cuda, or a list such as cuda:0,cuda:1")
    setup = options.setup()
    if setup.launchers:
        return _launched(setup, options, flags)
    role = _role(replace(setup, nproc=None, launchers=()), setup.nproc, options.job)
    if role.idle:
        return None
    role = replace(role, token=role.token or _token(options, role.info.nnodes, role.first, role.info.master))
    began = time.monotonic()
    wanted = [name for name in checks.names() if not (options.quick and checks.needs_torch(name))]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(_probe_in_worker, role.info, wanted)
        if not role.first:
            return _other(role, began, [*_probe_here(role.info, wanted), *worker.result()])
        gather = lambda: [*_probe_here(role.info, wanted, done=("port",)), *worker.result()]  # noqa: E731
        return _first(role, began, wanted, gather)


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
        return Role(replace(info, nnodes=1, master=Machines().master, contradiction=str(error)))
    if rank:
        return _role_of_rank(info, rank, os.environ, options.timeout_s)
    nproc = nproc or nvidia.visible() or 2
    try:
        machines = machines_of(setup, os.environ)
    except UserError:
        if info.nnodes > 1 and options.master_addr and _is_unusable(options.master_addr):
            info = replace(info, nproc=nproc, port=info.port or RENDEZVOUS_PORT)
            return Role(info, wait_s=0.0)  # the check `master` reports it
        raise
    info = replace(info, nproc=nproc, nnodes=machines.nnodes, node=machines.node_rank, master=machines.master)
    first = machines.nnodes == 1 or machines.is_master
    return Role(replace(info, port=machines.port), first=first, wait_s=machines.timeout_s)


def _role_of_rank(info: LaunchInfo, rank: LaunchedRank, env: Mapping[str, str], wait_s: float) -> Role:
    """Returns the role of a rank that an outer launcher has started: one rank on each machine checks it.

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
            say(
                f"the machines of this {rank.launcher} do not prove to each other who they are; give all ranks the "
                f"same random {TOKEN} in their environment where others reach port {near} of {host}"
            )
    token = token or f"the launch {rank.launcher} {rank.id}"
    return Role(info, token, first=rank.rank == 0, idle=rank.local_rank != 0, wait_s=wait_s)


def _token(options: DoctorOptions, nnodes: int, first: bool, master: str) -> str:
    """Returns the token of this doctor. Without one in the environment the first machine makes one, and prints the line
    for the others."""
    token = tokens.given(os.environ)
    if token or nnodes == 1:
        return token or tokens.new()
    if not first:
        raise UserError(
            f"this machine has no {TOKEN}; type here the line that samestep doctor prints on {master}, or set the same "
            f"random {TOKEN} on each machine"
        )
    token = tokens.new()
    words = arguments(options, DoctorOptions, ("node_rank",)) + [options.job] * bool(options.job)
    number = " --node-rank N" if options.machines.node_rank is not None else ""
    say(f"type on each other machine: {TOKEN}={token} samestep doctor {shlex.join(words)}{number}")
    return token


def _launched(setup: Setup, options: DoctorOptions, flags: Sequence[str]) -> int:
    """Starts this command with a launcher, as `run` would start its ranks; one rank on each machine checks it."""
    machines = machines_of(setup, os.environ)
    name = setup.launchers[0]
    module = launch.load(name)
    if why := module.missing(machines, os.environ):
        raise UserError(f"--launcher {name}: {why}")
    more = [options.job] * bool(options.job) + ["--device", setup.device, *flags] + ["--quick"] * options.quick
    more += ["--out", str(setup.out)] if setup.out else []
    first = machines.nnodes == 1 or machines.single_launch or machines.is_master
    token = _token(options, 1 if machines.single_launch else machines.nnodes, first, machines.master)
    machines = replace(machines, exported=(TOKEN,))
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as folder:
        program = (*module_arguments("samestep"), "doctor", *more)
        command = module.plan(program, Shape(setup.nproc or 2, folder, machines))
        started = subprocess.Popen(command.argv, env=os.environ | dict(command.env) | {TOKEN: token})
        return wait_for(started, f"the doctors that {name} has started are still running")


def _is_unusable(master: str) -> bool:
    """Whether a name is unknown here, or leads to this machine alone."""
    try:
        return any(address.startswith("127.") or address == "::1" for address in network.addresses(master))
    except UserError:
        return True


def _probe_here(info: LaunchInfo, wanted: Sequence[str], done: Sequence[str] = ()) -> list[Probed]:
    """Gathers the facts of this machine that need no torch."""
    mine = [name for name in wanted if not checks.is_measured(name) and not checks.is_in_worker(name)]
    return [Probed.of(name, info) for name in mine if name not in done]


def _probe_in_worker(info: LaunchInfo, wanted: Sequence[str]) -> list[Probed]:
    mine = tuple(name for name in wanted if checks.is_in_worker(name))
    if not mine:
        return []
    try:
        return list(ask_probes(ProbeQuestion(info, mine), WORKER_S).probed)
    except (TrainingFailed, UserError) as error:  # a torch that does not import ends the worker
        facts = {"torch_build": as_json(torch_build.Facts(str(error)))}
        return [Probed(name, facts.get(name), "" if name in facts else str(error)) for name in mine]


def _other(role: Role, began: float, probed: list[Probed]) -> Report | int:
    """Runs on each machine but the first. Where it cannot connect to the first one, judges this machine alone."""
    connection, here, dialled = arrivals.connect(role.info, probed, role.wait_s, role.token)
    try:
        code = fleet.serve(connection, here, role.info) if connection else None
    finally:
        here.close()
    if code is not None:
        say(f"the report is on the first machine, {role.info.master}")
        return code
    master = Probed.of("master", replace(role.info, connect_error=dialled))
    probed = [each for each in probed if each.check not in NOT_CONNECTED] + [master]
    return _report([(here.name, probed)], {}, began)


def _first(role: Role, began: float, wanted: Sequence[str], gather: Callable[[], list[Probed]]) -> Report:
    """Runs on the first machine: waits for the others, has them measure, judges, and stops them."""
    info, probed = role.info, [Probed.of("port", role.info)]
    listening = _listening(info) if info.nnodes > 1 and role.wait_s else None
    arriving = arrivals.Arrivals(listening, role.token) if listening else None
    probed += gather()
    connected = arriving.wait(info.nnodes - 1, role.wait_s) if arriving else []
    if arriving and arriving.strangers:
        say(f"{printable(arriving.strangers[-1])} has connected with another {TOKEN} than this machine's: not let in")
    route = network.route_to(info.master)
    here = fleet.LocalMachine(socket.gethostname(), route[1] if route else "127.0.0.1", info, role.token)
    others = fleet.remote_machines(here, connected)
    greetings = {id(connection): greeting for connection, greeting in connected}
    code = 1
    try:
        seen = [(here.name, probed)]
        seen += [(other.name, list(greetings[id(other.connection)].probed)) for other in others]
        measured = _measure(here, others, info, wanted)
        report = _report(seen, measured, began)
        code = int(report.failed)
        return report
    finally:
        for other in others:
            other.stop(code)
        here.close()
        if arriving:
            arriving.close()


def _listening(info: LaunchInfo) -> socket.socket | None:
    """Opens the port of the rendezvous; None where it is taken, as the check `port` says."""
    try:
        return network.bound(info.master, info.port)
    except OSError:
        return None


def _measure(
    here: fleet.LocalMachine, others: Sequence[fleet.RemoteMachine], info: LaunchInfo, wanted: Sequence[str]
) -> dict[str, object]:
    """Gathers the facts of the checks that measure all machines: check -> its facts, or the error."""
    machines: tuple[Machine, ...] = (here, *others)
    measured: dict[str, object] = {}
    lost: ConnectionError | None = None
    try:
        ports = tuple((machine.address, machine.listen()) for machine in machines)
        for other in others:
            other.meet(ports)
    except ConnectionError as error:
        lost = error
    for name in filter(checks.is_measured, wanted):
        try:
            measured[name] = lost or checks.measure(name, machines, info)
        except Exception as error:
            measured[name] = error
    return measured


def _report(seen: Sequence[tuple[str, list[Probed]]], measured: Mapping[str, object], began: float) -> Report:
    """Has each check judge its facts. seen: (machine, its facts)."""
    judged: list[Judged] = []
    facts: dict[str, object] = {}
    for name in checks.names():
        group = checks.load(name).GROUP
        findings: list[Finding] = []
        if checks.is_measured(name):
            value = measured.get(name)
            if isinstance(value, Exception):
                lost = isinstance(value, ConnectionError)
                findings.append(Finding("FAIL" if lost else "UNKNOWN", f"not measured: {value}"))
            elif value is not None:
                findings, facts[name] = _findings(name, value), as_json(value)
        else:
            findings, plain = _judge(name, seen)
            facts |= {name: plain} if plain else {}
        judged += [Judged(name, group, each.status, each.why, each.fix, each.machine) for each in findings]
    return Report(tuple(machine for machine, _ in seen), tuple(judged), time.monotonic() - began, facts)


def _judge(name: str, seen: Sequence[tuple[str, list[Probed]]]) -> tuple[list[Finding], dict[str, object]]:
    """Has a check judge the facts of all machines that have them. Returns the facts too, as plain values."""
    kind, findings, facts, plain = checks.load(name).Facts, list[Finding](), {}, {}
    for machine, probed in seen:
        for each in probed:
            if each.check != name:
                continue
            if each.error:
                findings.append(Finding("UNKNOWN", f"not probed: {each.error}", machine=machine))
                continue
            try:
                read = from_json(kind, each.facts, f"what {machine} says")
                check_bounds(as_json(read))
                facts[machine], plain[machine] = read, each.facts
            except (UserError, ValueError) as error:
                findings.append(Finding("UNKNOWN", f"not probed: {error}", machine=machine))
    return findings + (_findings(name, facts) if facts else []), plain


def _findings(check: str, facts: object) -> list[Finding]:
    """Has a check judge its facts; what another machine says of itself may be of the right types and make no sense."""
    try:
        return checks.load(check).judge(facts)
    except Exception as error:
        return [Finding("UNKNOWN", f"not judged: {type(error).__name__}: {error}")]
