"""The machines of a doctor: how they find each other, and what the first one has each of them do.

The first machine listens, the others connect, and all prove a token. Then the others answer the first one's requests.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from samestep.doctor import throughput
from samestep.doctor.connection import Connection, Lost, WrongToken
from samestep.doctor.machine import DEVICE, Flow, LaunchInfo, Trial, TrialRecord
from samestep.doctor.probes import collective
from samestep.doctor.records import Answer, Greeting, Probed, Request, TrialRank
from samestep.doctor.token import TOKEN
from samestep.errors import UserError, printable
from samestep.message import Message, message
from samestep.records.files import read, write
from samestep.world import RANK_VARIABLES, network
from samestep.world.imports import module_arguments
from samestep.world.network import Dialled
from samestep.world.processes import COMMAND, die_with_parent, kill, this_command
from samestep.world.regular_files import open_new, remove_file

ANSWER_S = 180.0  # how long the first machine waits for an answer
START_S = 60.0  # in which a rank has imported torch
MOST_RANKS = 4096  # of a machine
FIRST_PORT = 1024  # below are those of the system
LONGEST_SEND_S, LONGEST_WAIT_S = 5.0, 120.0
LONGEST_ADDRESS = 60  # characters, where it is shown
GREETING_S = 60.0  # in which a machine that has proved its token has sent its facts
MOST_GREETING = 64  # connections at a time that have not proved the token
MOST_PROBED = 200
MOST_SILENT = 3  # attempts in which the port is open and no doctor answers


class LocalMachine:
    """This machine. address: by which the others reach it. token: of this doctor."""

    def __init__(self, name: str, address: str, info: LaunchInfo, token: str = "") -> None:
        self.name, self.address, self.nproc, self._master = name, address, info.nproc, info.master
        self._token = token
        self._sink: throughput.Sink | None = None
        self._rendezvous: socket.socket | None = None
        self._ranks: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._until = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-doctor-")

    def listen(self) -> int:
        self._sink = self._sink or throughput.Sink(self.address, self._token)
        return self._sink.port

    def dial(self, address: str, port: int) -> Dialled:
        return network.dial(address, port)

    def send(self, address: str, port: int, seconds: float) -> Flow:
        return throughput.send(address, port, seconds, self._token)

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
            remove_file(old)
        environment = {name: value for name, value in os.environ.items() if name not in (RANK_VARIABLES, TOKEN)}
        environment |= {COMMAND: this_command(), "OMP_NUM_THREADS": "1", **trial.variables}
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in environment else {}
        for rank in range(trial.first_rank, trial.first_rank + trial.local_size):
            file = folder / f"rank-{rank}.json"
            listening = self._rendezvous.fileno() if self._rendezvous and not rank else None
            write(file, TrialRank(trial, rank, listening))
            with open_new(folder / f"log-{rank}.txt") as log:
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

    def ended(self) -> tuple[TrialRecord, ...]:
        folder, tried = Path(self._folder.name), []
        for rank, process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._until - time.monotonic()))
            if process.poll() is None:
                kill(process)
            with suppress(OSError, UserError):
                tried.append(read(TrialRecord, folder / f"tried-{rank}.json"))
                continue
            lines = (folder / f"log-{rank}.txt").read_text(errors="replace").strip().splitlines()
            tried.append(TrialRecord(rank, lines[-1] if lines else "", exit_code=process.returncode))
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
        self.connection, self._first_rank = connection, 0

    def _ask(self, request: Request) -> Answer:
        try:
            self.connection.send(request)
            return self.connection.receive(Answer)
        except Lost as error:
            raise self._lost(error.message) from None

    def _lost(self, why: Message) -> Lost:
        return Lost(message("machine_is_lost", machine=self.name, why=why))

    def listen(self) -> int:
        port = self._ask(Request("listen")).port
        if not FIRST_PORT <= port < 1 << 16:
            raise self._lost(message("machine_listens_at_no_port", port=port))
        return port

    def meet(self, ports: tuple[tuple[str, int], ...]) -> None:
        """Tells the machine at which addresses and ports the machines of this doctor count: it connects to no other."""
        self._ask(Request("meet", ports))

    def dial(self, address: str, port: int) -> Dialled:
        answer = self._ask(Request("dial", address=address, port=port))
        return answer.dialled or Dialled("error", 0.0, "no answer")

    def send(self, address: str, port: int, seconds: float) -> Flow:
        answer = self._ask(Request("send", address=address, port=port, seconds=seconds))
        return answer.flow or Flow(0, 0.0, "lost", "no answer")

    def now(self) -> float:
        return self._ask(Request("now")).seconds

    def interfaces(self) -> tuple[str, ...]:
        return self._ask(Request("interfaces")).names

    def free_port(self) -> int:
        raise NotImplementedError("ranks meet on the first machine")

    def start(self, trial: Trial) -> None:
        self._first_rank = trial.first_rank
        self._ask(Request("start", trial=trial))

    def ended(self) -> tuple[TrialRecord, ...]:
        ranks = self._ask(Request("ended")).ranks
        if [tried.rank for tried in ranks] != [*range(self._first_rank, self._first_rank + self.nproc)]:
            raise self._lost(message("machine_does_not_answer_for_its_ranks"))
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
                raise UserError(message("first_machine_asks_too_much", master=info.master, port=info.port, why=why))
            ports = ports or request.ports
            connection.send(_answer(machine, request))
    except ConnectionError:
        return None


def why_refused(
    request: Request, info: LaunchInfo, ports: Collection[tuple[str, int]], interfaces: Sequence[str]
) -> Message | None:
    """Returns why a machine does not do what another asks for; None where it does. A pure function.

    ports: what 'meet' has told before: each machine's address and the port at which it counts.
    """
    match request.do:
        case "meet":
            if ports or not 0 < len(request.ports) <= info.nnodes:
                return message("asked_to_meet_machines", machines=len(request.ports), nnodes=info.nnodes)
            forbidden = [port for _, port in request.ports if not FIRST_PORT <= port < 1 << 16]
            return message("asked_to_connect_to_port", address=None, port=forbidden[0]) if forbidden else None
        case "dial" | "send":
            if (request.address, request.port) not in ports:
                address = printable(request.address, LONGEST_ADDRESS)
                return message("asked_to_connect_to_port", address=address, port=request.port)
            is_short = 0 <= request.seconds <= LONGEST_SEND_S
            return None if is_short else message("asked_to_send_for_long", seconds=request.seconds)
        case "start":
            return _why_not_started(request.trial, info, {address for address, _ in ports}, interfaces)
        case _:
            return None


def _why_not_started(
    trial: Trial | None, info: LaunchInfo, addresses: Collection[str], interfaces: Sequence[str]
) -> Message | None:
    if trial is None or trial.local_size != info.nproc or not 0 <= trial.first_rank <= trial.size - trial.local_size:
        return message("asked_to_start_other_ranks")
    if trial.size > info.nnodes * MOST_RANKS or not 0 < trial.wait_s <= LONGEST_WAIT_S:
        return message("asked_to_start_ranks_that_wait", ranks=trial.size, seconds=trial.wait_s)
    if trial.master not in addresses or not FIRST_PORT <= trial.port < 1 << 16:
        master = printable(trial.master, LONGEST_ADDRESS)
        return message("asked_to_start_ranks_that_meet_elsewhere", master=master, port=trial.port)
    if not DEVICE.fullmatch(trial.device):
        return message("asked_to_start_ranks_on_no_device")
    if not collective.may_be_set(trial.variables, interfaces):
        variables = " ".join(f"{name}={value}" for name, value in trial.variables.items())
        return message("asked_to_set_variables", variables=printable(variables, 200))
    return None


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


def remote_machines(local: LocalMachine, connected: Sequence[tuple[Connection, Greeting]]) -> list[RemoteMachine]:
    """Returns the other machines in the order of their numbers, each with a name of its own."""
    used, machines = {local.name}, []
    for connection, greeting in sorted(connected, key=lambda pair: (pair[1].node is None, pair[1].node or 0)):
        name = given = greeting.name if re.fullmatch(r"\w[\w.-]{0,252}", greeting.name) else connection.addresses[1]
        number = 2
        while name in used:
            name, number = f"{given} ({number})", number + 1
        used.add(name)
        machines.append(RemoteMachine(connection, name, greeting))
    return machines


class Arrivals:
    """The machines that connect to the first one. It listens from the beginning, to many at a time: those that do not
    know the token, or say nothing, keep no other waiting."""

    def __init__(self, listening: socket.socket, token: str) -> None:
        self._listening, self._token = listening, token
        self._arrived: queue.Queue[tuple[Connection, Greeting]] = queue.Queue()
        self._greeting: deque[socket.socket] = deque()
        self._threads = threading.Semaphore(2 * MOST_GREETING)  # those that are turned away have theirs until it ends
        self.strangers: list[str] = []  # addresses of those that had another token
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                stream, (address, *_) = self._listening.accept()
                self._greeting.append(stream)
                if len(self._greeting) > MOST_GREETING:
                    oldest = self._greeting.popleft()
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # ends its thread at once
                    oldest.close()
                self._threads.acquire()
                threading.Thread(target=self._greet, args=(stream, str(address)), daemon=True).start()

    def _greet(self, stream: socket.socket, address: str) -> None:
        try:
            connection = Connection(stream, self._token, "first", GREETING_S)
        except WrongToken:
            self.strangers.append(address)
            return
        except ConnectionError:  # another program, which only checked that the port is open
            return
        finally:
            self._threads.release()
            with suppress(ValueError):
                self._greeting.remove(stream)
        try:
            greeting = connection.receive(Greeting)
            if not 0 < greeting.nproc <= MOST_RANKS or len(greeting.probed) > MOST_PROBED:
                raise Lost(message("greeting_is_out_of_bounds"))
        except ConnectionError:
            connection.close()
            return
        connection.wait_s = ANSWER_S
        self._arrived.put((connection, greeting))

    def wait(self, count: int, wait_s: float) -> list[tuple[Connection, Greeting]]:
        """Waits for `count` machines. Returns those that have connected within `wait_s` seconds."""
        connected: list[tuple[Connection, Greeting]] = []
        until = time.monotonic() + wait_s
        with suppress(queue.Empty):
            while len(connected) < count:
                connected.append(self._arrived.get(timeout=max(until - time.monotonic(), 1e-3)))
        return connected

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listening.close()


def connect(
    info: LaunchInfo, probed: Sequence[Probed], wait_s: float, token: str
) -> tuple[Connection | None, LocalMachine, Dialled]:
    """Connects to the first machine, which may not listen yet, and sends it the facts of this one.

    Returns the connection, this machine, and how the last attempt ended; no connection where none opened within
    `wait_s` seconds. Raises UserError where the first machine has another token.
    """
    until = time.monotonic() + wait_s
    route = network.route_to(info.master)
    local = LocalMachine(socket.gethostname(), route[1] if route else "127.0.0.1", info, token)
    silent = 0
    while True:
        dialled = network.dial(info.master, info.port)
        if dialled.outcome == "open":
            try:
                stream = socket.create_connection((info.master, info.port), timeout=ANSWER_S)
                connection = Connection(stream, token, "other", ANSWER_S)
                connection.send(Greeting(local.name, info.node, info.nproc, tuple(probed)))
                local.address = connection.addresses[0]
                return connection, local, dialled
            except WrongToken as error:
                local.close()
                fields = {"master": info.master, "port": info.port, "variable": TOKEN, "error": error.message}
                raise UserError(message("first_machine_has_another_token", **fields)) from None
            except OSError:
                silent += 1
        if time.monotonic() > until or dialled.outcome == "unknown name" or silent == MOST_SILENT:
            return None, local, dialled
        time.sleep(0.2)
