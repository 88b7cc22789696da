"""doctor: gathers facts on each machine, has them judged by the checks of world/checks, and reports on the first one.

The first machine listens on the port of the rendezvous. The others come with what they have seen, and then do what the
first asks: open connections, send, start ranks. Where they cannot come, each judges itself, and says why it could not.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from samestep import launch
from samestep.commands import fleet
from samestep.commands.ask_worker import ask_probes
from samestep.commands.doctor_options import DoctorOptions
from samestep.commands.machines import detect_launched_rank, machines_of
from samestep.commands.setup import Setup
from samestep.errors import TrainingFailed, UserError, say
from samestep.launch import Machines, Shape
from samestep.launch.started_by import LaunchedRank
from samestep.records.doctor import Judged, Probed, ProbeQuestion, Report
from samestep.records.files import as_json, from_json
from samestep.world import checks, network, nvidia
from samestep.world.checks import Finding, Place, torch_build
from samestep.world.machine import Machine

WORKER_S = 120.0  # in which torch and the engines' packages are imported
APART = 53  # from an outer launcher's MASTER_PORT, which its own store holds, to the doctor's port
UNMET = ("machines", "master")  # judged again where the machines have not met


@dataclass(frozen=True)
class Seat:
    """This command's part. place: what it was asked. first: whether it reports. idle: whether another process of its
    machine does its part. wait_s: how long machines wait for each other."""

    place: Place
    first: bool = True
    idle: bool = False
    wait_s: float = 120.0


def doctor(options: DoctorOptions, flags: Sequence[str] = ()) -> Report | int | None:
    """Returns the report; on another machine than the first its exit code; None on the other ranks of a machine.

    flags: how the report is printed, for the command that a launcher starts on each machine.
    """
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", options.device):
        raise UserError(f"--device {options.device}: give auto, cpu, cuda, or a list such as cuda:0,cuda:1")
    setup = options.setup()
    if setup.launchers:
        return _launched(setup, options, flags)
    seat = _seat(replace(setup, nproc=None, launchers=()), setup.nproc, options.job)
    if seat.idle:
        return None
    began = time.monotonic()
    wanted = [name for name in checks.names() if not (options.quick and checks.needs_torch(name))]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(_probe_in_worker, seat.place, wanted)
        if not seat.first:
            return _other(seat, began, [*_probe_here(seat.place, wanted), *worker.result()])
        gather = lambda: [*_probe_here(seat.place, wanted, done=("port",)), *worker.result()]  # noqa: E731
        return _first(seat, began, wanted, gather)


def _seat(setup: Setup, nproc: int | None, job: str) -> Seat:
    """Finds this command's part from the options and the environment."""
    options = setup.machines
    place = Place(
        nproc=nproc or 2,
        nnodes=options.most_nnodes or 1,
        node=options.node_rank,
        master=options.master_addr or Machines().master,
        port=options.port,
        out=str(setup.out or Path("runs")),
        job=job,
        device=setup.device,
    )
    try:
        rank = None if nproc or options.nnodes else detect_launched_rank(os.environ, setup)
    except UserError as error:
        return Seat(replace(place, nnodes=1, master=Machines().master, contradiction=str(error)))
    if rank:
        return _seat_of_rank(place, rank, options.timeout_s)
    nproc = nproc or nvidia.visible() or 2
    try:
        machines = machines_of(setup, os.environ)
    except UserError:
        if place.nnodes > 1 and options.master_addr and _is_unusable(options.master_addr):
            return Seat(replace(place, nproc=nproc, port=place.port or 29500), wait_s=0.0)  # the check `master` says it
        raise
    place = replace(place, nproc=nproc, nnodes=machines.nnodes, node=machines.node_rank, master=machines.master)
    first = machines.nnodes == 1 or machines.is_master
    return Seat(replace(place, port=machines.port), first=first, wait_s=machines.timeout_s)


def _seat_of_rank(place: Place, rank: LaunchedRank, wait_s: float) -> Seat:
    """Returns the part of a rank that an outer launcher has started: one rank of each machine does the machine's."""
    nnodes = -(-rank.size // rank.local_size)
    place = replace(place, nproc=rank.local_size, nnodes=nnodes, node=None, started_by=rank.launcher)
    if nnodes > 1:
        host, _, port = rank.init_method.removeprefix("tcp://").rpartition(":")
        host, port = (host or os.environ["MASTER_ADDR"]), (port if host else os.environ["MASTER_PORT"])
        near = int(port) + APART if int(port) + APART < 65536 else int(port) - APART
        place = replace(place, master=host.strip("[]"), port=near)
    return Seat(place, first=rank.rank == 0, idle=rank.local_rank != 0, wait_s=wait_s)


def _launched(setup: Setup, options: DoctorOptions, flags: Sequence[str]) -> int:
    """Starts this command by a launcher, as `run` would start its ranks; one on each machine does its part."""
    machines = machines_of(setup, os.environ)
    name = setup.launchers[0]
    module = launch.load(name)
    if why := module.missing(machines, os.environ):
        raise UserError(f"--launcher {name}: {why}")
    more = [options.job] * bool(options.job) + ["--device", setup.device, *flags] + ["--quick"] * options.quick
    more += ["--out", str(setup.out)] if setup.out else []
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as folder:
        command = module.plan(("-m", "samestep", "doctor", *more), Shape(setup.nproc or 2, folder, machines))
        return subprocess.call(command.argv, env=os.environ | dict(command.env))


def _is_unusable(master: str) -> bool:
    """Whether a name is unknown here, or leads to this machine alone."""
    try:
        return any(address.startswith("127.") or address == "::1" for address in network.addresses(master))
    except UserError:
        return True


def _probe_here(place: Place, wanted: Sequence[str], done: Sequence[str] = ()) -> list[Probed]:
    """Gathers the facts of this machine that need no torch."""
    mine = [name for name in wanted if not checks.is_measured(name) and not checks.is_in_worker(name)]
    return [Probed.of(name, place) for name in mine if name not in done]


def _probe_in_worker(place: Place, wanted: Sequence[str]) -> list[Probed]:
    mine = tuple(name for name in wanted if checks.is_in_worker(name))
    if not mine:
        return []
    try:
        return list(ask_probes(ProbeQuestion(place, mine), WORKER_S).probed)
    except (TrainingFailed, UserError) as error:  # a torch that does not import ends the worker
        facts = {"torch_build": as_json(torch_build.Facts(str(error)))}
        return [Probed(name, facts.get(name), "" if name in facts else str(error)) for name in mine]


def _other(seat: Seat, began: float, probed: list[Probed]) -> Report | int:
    """Does another machine's part. Where it cannot reach the first one, judges this machine alone."""
    line, here, dialled = fleet.greet(seat.place, probed, seat.wait_s)
    try:
        code = fleet.serve(line, here) if line else None
    finally:
        here.close()
    if code is not None:
        say(f"the report is on the first machine, {seat.place.master}")
        return code
    master = Probed.of("master", replace(seat.place, unmet=dialled))
    probed = [each for each in probed if each.check not in UNMET] + [master]
    return _report([(here.name, probed)], {}, began)


def _first(seat: Seat, began: float, wanted: Sequence[str], gather: Callable[[], list[Probed]]) -> Report:
    """Does the first machine's part: waits for the others, asks them, judges, and stops them."""
    place, probed = seat.place, [Probed.of("port", seat.place)]
    listening = _listening(place) if place.nnodes > 1 and seat.wait_s else None
    probed += gather()
    came = fleet.welcome(listening, place.nnodes - 1, seat.wait_s) if listening else []
    route = network.route_to(place.master)
    here = fleet.Here(socket.gethostname(), route[1] if route else "127.0.0.1", place)
    others = fleet.named(here, came)
    greetings = {id(line): greeting for line, greeting in came}
    code = 1
    try:
        seen = [(here.name, probed)]
        seen += [(other.name, list(greetings[id(other.line)].probed)) for other in others]
        measured = _measure((here, *others), place, wanted)
        report = _report(seen, measured, began)
        code = int(report.failed)
        return report
    finally:
        for other in others:
            other.stop(code)
        here.close()
        if listening:
            listening.close()


def _listening(place: Place) -> socket.socket | None:
    """Opens the port of the rendezvous; None where it is taken, as the check `port` says."""
    try:
        return network.bound(place.master, place.port)
    except OSError:
        return None


def _measure(machines: tuple[Machine, ...], place: Place, wanted: Sequence[str]) -> dict[str, object]:
    """Gathers the facts of the checks that ask all machines: check -> its facts, or the error."""
    found: dict[str, object] = {}
    for name in wanted:
        if checks.is_measured(name):
            try:
                found[name] = checks.measure(name, machines, place)
            except Exception as error:
                found[name] = error
    return found


def _report(seen: Sequence[tuple[str, list[Probed]]], measured: Mapping[str, object], began: float) -> Report:
    """Has each check judge its facts. seen: (machine, its facts)."""
    judged: list[Judged] = []
    facts: dict[str, object] = {}
    for name in checks.names():
        group = checks.load(name).GROUP
        found: list[Finding] = []
        if checks.is_measured(name):
            value = measured.get(name)
            if isinstance(value, Exception):
                lost = isinstance(value, ConnectionError)
                found.append(Finding("FAIL" if lost else "UNKNOWN", f"not measured: {value}"))
            elif value is not None:
                found, facts[name] = checks.load(name).judge(value), as_json(value)
        else:
            found, plain = _judge(name, seen)
            facts |= {name: plain} if plain else {}
        judged += [Judged(name, group, each.status, each.why, each.fix, each.machine) for each in found]
    return Report(tuple(machine for machine, _ in seen), tuple(judged), time.monotonic() - began, facts)


def _judge(name: str, seen: Sequence[tuple[str, list[Probed]]]) -> tuple[list[Finding], dict[str, object]]:
    """Has a check judge the facts of all machines that have them. Returns the facts too, as plain values."""
    kind, found, facts, plain = checks.load(name).Facts, list[Finding](), {}, {}
    for machine, probed in seen:
        for each in probed:
            if each.check != name:
                continue
            if each.error:
                found.append(Finding("UNKNOWN", f"not probed: {each.error}", machine=machine))
            else:
                facts[machine], plain[machine] = from_json(kind, each.facts, f"what {machine} says"), each.facts
    return found + (checks.load(name).judge(facts) if facts else []), plain
