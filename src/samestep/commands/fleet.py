"""The machines that a doctor checks: this one, and others over a connection; the first sends requests to the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from samestep.errors import UserError
from samestep.records.doctor import Answer, Greeting, Probed, Request, TrialRank
from samestep.records.files import from_record, read, with_schema, write
from samestep.world import RANK_VARIABLES, network, wire
from samestep.world.checks import LaunchInfo
from samestep.world.machine import Dialled, Flow, RankTried, Trial
from samestep.world.orphans import COMMAND, die_with_parent, this_command

ANSWER_S = 180.0  # how long the first machine waits for an answer
START_S = 60.0  # in which a rank has imported torch
T = TypeVar("T")


class LocalMachine:
    """This machine. address: by which the others reach it."""

    def __init__(self, name: str, address: str, info: LaunchInfo) -> None:
        self.name, self.address, self.nproc, self._master = name, address, info.nproc, info.master
        self._sink: wire.Sink | None = None
        self._rendezvous: socket.socket | None = None
        self._ranks: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._until = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-doctor-")

    def listen(self) -> int:
        self._sink = self._sink or wire.Sink(self.address)
        return self._sink.port

    def dial(self, address: str, port: int) -> Dialled:
        return wire.dial(address, port)

    def send(self, address: str, port: int, seconds: float) -> Flow:
        return wire.send(address, port, seconds)

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
        environment = {name: value for name, value in os.environ.items() if name != RANK_VARIABLES}
        environment |= {COMMAND: this_command(), "OMP_NUM_THREADS": "1", **trial.variables}
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in environment else {}
        for rank in range(trial.first, trial.first + trial.here):
            file = folder / f"rank-{rank}.json"
            listening = self._rendezvous.fileno() if self._rendezvous and not rank else None
            write(file, TrialRank(trial, rank, listening))
            with open(folder / f"log-{rank}.txt", "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "samestep.worker", "--try", str(file)],
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
                process.kill()
                process.wait()
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
            process.kill()
            process.wait()
        self._forget_port()
        if self._sink:
            self._sink.close()
        self._folder.cleanup()


class Connection:
    """Sends and receives records as lines of JSON. Raises ConnectionError where the other side is lost."""

    def __init__(self, stream: socket.socket, wait_s: float) -> None:
        stream.settimeout(wait_s)
        self._stream = stream
        self._file: IO[str] = stream.makefile("rw", encoding="utf-8", newline="\n")

    def send(self, record: Any) -> None:
        try:
            self._file.write(json.dumps(with_schema(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def receive(self, kind: type[T]) -> T:
        try:
            line = self._file.readline()
            if not line:
                raise ConnectionError("it has closed the connection")
            return from_record(kind, json.loads(line), "what it sends", "install the same on each machine")
        except (OSError, ValueError, UserError) as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._stream.close()


class RemoteMachine:
    """Another machine, which answers the requests that it receives over a connection."""

    def __init__(self, connection: Connection, name: str, greeting: Greeting) -> None:
        self.name, self.address, self.nproc = name, greeting.address, greeting.info.nproc
        self.connection = connection

    def _ask(self, request: Request) -> Answer:
        try:
            self.connection.send(request)
            return self.connection.receive(Answer)
        except ConnectionError as error:
            raise ConnectionError(f"{self.name} is lost: {error}") from None

    def listen(self) -> int:
        return self._ask(Request("listen")).port

    def dial(self, address: str, port: int) -> Dialled:
        return self._ask(Request("dial", address, port)).dialled or Dialled("error", 0.0, "no answer")

    def send(self, address: str, port: int, seconds: float) -> Flow:
        return self._ask(Request("send", address, port, seconds)).flow or Flow(0, 0.0, "no answer")

    def now(self) -> float:
        return self._ask(Request("now")).seconds

    def interfaces(self) -> tuple[str, ...]:
        return self._ask(Request("interfaces")).names

    def free_port(self) -> int:
        raise NotImplementedError("ranks meet on the first machine")

    def start(self, trial: Trial) -> None:
        self._ask(Request("start", trial=trial))

    def ended(self) -> tuple[RankTried, ...]:
        return self._ask(Request("ended")).ranks

    def stop(self, code: int) -> None:
        with suppress(ConnectionError):
            self.connection.send(Request("stop", code=code))
        self.connection.close()


def serve(connection: Connection, machine: LocalMachine) -> int | None:
    """Answers the first machine's requests until its 'stop'. Returns the exit code of it; None where it is lost."""
    try:
        while True:
            request = connection.receive(Request)
            if request.do == "stop":
                return request.code
            connection.send(_answer(machine, request))
    except ConnectionError:
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
            return Answer()
        case "ended":
            return Answer(ranks=machine.ended())
    return Answer(seconds=machine.now())


def accept(listening: socket.socket, count: int, wait_s: float) -> list[tuple[Connection, Greeting]]:
    """Waits for `count` machines. Returns those that have connected within `wait_s` seconds."""
    connected: list[tuple[Connection, Greeting]] = []
    until = time.monotonic() + wait_s
    while len(connected) < count and (left := until - time.monotonic()) > 0:
        listening.settimeout(left)
        try:
            stream, _ = listening.accept()
        except TimeoutError:
            break
        connection = Connection(stream, 10.0)
        try:
            connected.append((connection, connection.receive(Greeting)))
            stream.settimeout(ANSWER_S)
        except ConnectionError:  # another program, which only checked that the port is open
            connection.close()
    return connected


def connect(
    info: LaunchInfo, probed: Sequence[Probed], wait_s: float
) -> tuple[Connection | None, LocalMachine, Dialled]:
    """Connects to the first machine, which may not listen yet, and sends it the facts of this one.

    Returns the connection, this machine, and how the last attempt ended; no connection where none opened within
    `wait_s` seconds.
    """
    until = time.monotonic() + wait_s
    route = network.route_to(info.master)
    here = LocalMachine(socket.gethostname(), route[1] if route else "127.0.0.1", info)
    while (dialled := wire.dial(info.master, info.port)).outcome != "open":
        if time.monotonic() > until or dialled.outcome == "unknown name":
            return None, here, dialled
        time.sleep(0.2)
    connection = Connection(socket.create_connection((info.master, info.port), timeout=ANSWER_S), ANSWER_S)
    connection.send(Greeting(here.name, here.address, info, tuple(probed)))
    return connection, here, dialled


def remote_machines(here: LocalMachine, connected: Sequence[tuple[Connection, Greeting]]) -> list[RemoteMachine]:
    """Returns the other machines in the order of their numbers, each with a name of its own."""
    used, machines = {here.name}, []
    for connection, greeting in sorted(connected, key=lambda each: (each[1].info.node is None, each[1].info.node or 0)):
        name, number = greeting.name, 2
        while name in used:
            name, number = f"{greeting.name} ({number})", number + 1
        used.add(name)
        machines.append(RemoteMachine(connection, name, greeting))
    return machines
