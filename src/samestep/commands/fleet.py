"""The machines that a doctor checks: this one, and others over a connection; the first sends requests to the others."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from samestep.commands.authenticated_connection import Connection
from samestep.commands.doctor_options import DEVICE
from samestep.errors import UserError, printable
from samestep.records.doctor import Answer, Greeting, Request, TrialRank
from samestep.records.files import read, write
from samestep.world import RANK_VARIABLES, network, wire
from samestep.world.checks import LaunchInfo, collective
from samestep.world.imports import module_arguments
from samestep.world.machine import Dialled, Flow, RankTried, Trial
from samestep.world.processes import COMMAND, die_with_parent, kill, this_command
from samestep.world.token import TOKEN

ANSWER_S = 180.0  # how long the first machine waits for an answer
START_S = 60.0  # in which a rank has imported torch
MOST_RANKS = 4096  # of a machine
FIRST_PORT = 1024  # below are those of the system
LONGEST_SEND_S, LONGEST_WAIT_S = 5.0, 120.0


class LocalMachine:
    """This machine. address: by which the others reach it. token: of this doctor."""

    def __init__(self, name: str, address: str, info: LaunchInfo, token: str = "") -> None:
        self.name, self.address, self.nproc, self._master = name, address, info.nproc, info.master
        self._token = token
        self._sink: wire.Sink | None = None
        self._rendezvous: socket.socket | None = None
        self._ranks: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._until = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-doctor-")

    def listen(self) -> int:
        self._sink = self._sink or wire.Sink(self.address, self._token)
        return self._sink.port

    def dial(self, address: str, port: int) -> Dialled:
        return wire.dial(address, port)

    def send(self, address: str, port: int, seconds: float) -> Flow:
        return wire.send(address, port, seconds, self._token)

    def now(self) -> float:
        return time.time()

    def interfaces(self) -> tuple[str, ...]:
        states, route = psutil.net_if_stats(), network.route_to(self._master)
        first = route[0] if route else ""
        names = [name for name, entries in network.interfaces().items() if entries and name in states]
        return tuple(sorted((name for name in names if states[name].isup), key=lambda name: name != first))

    def free_port(self) -> int:
        """Opens a port for the ranks' rendezvous, which the next trial's rank 0 inherits."""
        self._forget_port()
        self._rendezvous = network.bound(self.address, 0)
        return int(self._rendezvous.getsockname()[1])

    def _forget_port(self) -> None:
        if self._rendezvous:
            self._rendezvous.close()
        self._rendezvous = None

    def start(self, trial: Trial) -> None:
        self._ranks = []
        folder = Path(self._folder.name)
        for old in folder.iterdir():
            old.unlink()
        environment = {name: value for name, value in os.environ.items() if name not in (RANK_VARIABLES, TOKEN)}
        environment |= {COMMAND: this_command(), "OMP_NUM_THREADS": "1", **trial.variables}
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in environment else {}
        for rank in range(trial.first, trial.first + trial.here):
            file = folder / f"rank-{rank}.json"
            listening = self._rendezvous.fileno() if self._rendezvous and not rank else None
            write(file, TrialRank(trial, rank, listening))
            with open(folder / f"log-{rank}.txt", "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, *module_arguments("samestep.worker"), "--try", str(file)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=() if listening is None else (listening,),
                    preexec_fn=die_with_parent if sys.platform != "win32" else None,
                )
            self._ranks.append((rank, process))
        self._forget_port()
        self._until = time.monotonic() + START_S + 4 * trial.wait_s

    def ended(self) -> tuple[RankTried, ...]:
        folder, tried = Path(self._folder.name), []
        for rank, process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._until - time.monotonic()))
            if process.poll() is None:
                kill(process)
            with suppress(OSError, UserError):
                tried.append(read(RankTried, folder / f"tried-{rank}.json"))
                continue
            lines = (folder / f"log-{rank}.txt").read_text(errors="replace").strip().splitlines()
            how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
            tried.append(
                RankTried(rank, error=f"the process ended ({how}): {lines[-1] if lines else 'it printed nothing'}")
            )
        self._ranks = []
        return tuple(tried)

    def close(self) -> None:
        for _, process in self._ranks:
            kill(process)
        self._forget_port()
        if self._sink:
            self._sink.close()
        self._folder.cleanup()


class RemoteMachine:
    """Another machine, which answers the requests that it receives over a connection."""

    def __init__(self, connection: Connection, name: str, greeting: Greeting) -> None:
        self.name, self.address, self.nproc = name, connection.addresses[1], greeting.nproc
        self.connection, self._first = connection, 0

    def _ask(self, request: Request) -> Answer:
        try:
            self.connection.send(request)
            return self.connection.receive(Answer)
        except ConnectionError as error:
            raise ConnectionError(f"{self.name} is lost: {error}") from None

    def listen(self) -> int:
        port = self._ask(Request("listen")).port
        if not FIRST_PORT <= port < 1 << 16:
            raise ConnectionError(f"{self.name} is lost: it says that it listens at port {port}")
        return port

    def meet(self, ports: tuple[tuple[str, int], ...]) -> None:
        """Tells the machine at which addresses and ports the machines of this doctor count: it connects to no other."""
        self._ask(Request("meet", ports))

    def dial(self, address: str, port: int) -> Dialled:
        answer = self._ask(Request("dial", address=address, port=port))
        return answer.dialled or Dialled("error", 0.0, "no answer")

    def send(self, address: str, port: int, seconds: float) -> Flow:
        answer = self._ask(Request("send", address=address, port=port, seconds=seconds))
        return answer.flow or Flow(0, 0.0, "no answer")

    def now(self) -> float:
        return self._ask(Request("now")).seconds

    def interfaces(self) -> tuple[str, ...]:
        return self._ask(Request("interfaces")).names

    def free_port(self) -> int:
        raise NotImplementedError("ranks meet on the first machine")

    def start(self, trial: Trial) -> None:
        self._first = trial.first
        self._ask(Request("start", trial=trial))

    def ended(self) -> tuple[RankTried, ...]:
        ranks = self._ask(Request("ended")).ranks
        if [tried.rank for tried in ranks] != [*range(self._first, self._first + self.nproc)]:
            raise ConnectionError(f"{self.name} is lost: it does not answer for its ranks")
        return ranks

    def stop(self, code: int) -> None:
        with suppress(ConnectionError):
            self.connection.send(Request("stop", code=code))
        self.connection.close()


def serve(connection: Connection, machine: LocalMachine, info: LaunchInfo) -> int | None:
    """Answers the first machine's requests until its 'stop'. Returns the exit code of it; None where it is lost.

    Raises UserError for a request that the doctor never makes.
    """
    ports: tuple[tuple[str, int], ...] = ()
    try:
        while True:
            request = connection.receive(Request)
            if request.do == "stop":
                return int(request.code != 0)
            interfaces = machine.interfaces() if request.do == "start" else ()
            if why := why_refused(request, info, ports, interfaces):
                raise UserError(f"the machine at {info.master}:{info.port} asks for what the doctor never does: {why}")
            ports = ports or request.ports
            connection.send(_answer(machine, request))
    except ConnectionError:
        return None


def why_refused(
    request: Request, info: LaunchInfo, ports: Collection[tuple[str, int]], interfaces: Sequence[str]
) -> str:
    """Returns why a machine does not do what another asks for; '' where it does. A pure function.

    ports: what 'meet' has told before: each machine's address and the port at which it counts.
    """
    if request.do == "meet":
        if ports or not 0 < len(request.ports) <= info.nnodes:
            return f"to connect to {len(request.ports)} {'other ' * bool(ports)}machines of {info.nnodes}"
        odd = [port for _, port in request.ports if not FIRST_PORT <= port < 1 << 16]
        return f"to connect to port {odd[0]}" if odd else ""
    if request.do in ("dial", "send"):
        if (request.address, request.port) not in ports:
            return f"to connect to {printable(request.address, 60)}, port {request.port}"
        return "" if 0 <= request.seconds <= LONGEST_SEND_S else f"to send for {request.seconds:g} s"
    if request.do != "start":
        return ""
    trial = request.trial
    if trial is None or trial.here != info.nproc or not 0 <= trial.first <= trial.size - trial.here:
        return "to start other ranks than --nproc"
    if trial.size > info.nnodes * MOST_RANKS or not 0 < trial.wait_s <= LONGEST_WAIT_S:
        return f"to start {trial.size} ranks that wait for {trial.wait_s:g} s"
    if trial.master not in [address for address, _ in ports] or not FIRST_PORT <= trial.port < 1 << 16:
        return f"to start ranks that meet at {printable(trial.master, 60)}, port {trial.port}"
    if not DEVICE.fullmatch(trial.device):
        return "to start ranks on a device that is none"
    if not collective.may_be_set(trial.variables, interfaces):
        return f"to set {printable(' '.join(f'{name}={value}' for name, value in trial.variables.items()), 200)}"
    return ""


def _answer(machine: LocalMachine, request: Request) -> Answer:
    match request.do:
        case "listen":
            return Answer(port=machine.listen())
        case "dial":
            return Answer(dialled=machine.dial(request.address, request.port))
        case "send":
            return Answer(flow=machine.send(request.address, request.port, request.seconds))
        case "interfaces":
            return Answer(names=machine.interfaces())
        case "start":
            assert request.trial is not None
            machine.start(request.trial)
        case "ended":
            return Answer(ranks=machine.ended())
    return Answer(seconds=machine.now())


def remote_machines(here: LocalMachine, connected: Sequence[tuple[Connection, Greeting]]) -> list[RemoteMachine]:
    """Returns the other machines in the order of their numbers, each with a name of its own."""
    used, machines = {here.name}, []
    for connection, greeting in sorted(connected, key=lambda each: (each[1].node is None, each[1].node or 0)):
        name = said = greeting.name if re.fullmatch(r"\w[\w.-]{0,252}", greeting.name) else connection.addresses[1]
        number = 2
        while name in used:
            name, number = f"{said} ({number})", number + 1
        used.add(name)
        machines.append(RemoteMachine(connection, name, greeting))
    return machines
