"""The machines of a doctor: this one, and others over a connection to the first, which asks and they do."""

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
from samestep.records.files import KEY, SCHEMA, from_json, read, with_schema, write
from samestep.world import RANK_VARIABLES, network, wire
from samestep.world.checks import Place
from samestep.world.machine import Dialled, Flow, RankTried, Trial
from samestep.world.orphans import COMMAND, die_with_parent, this_command

ANSWER_S = 180.0  # how long the first machine waits for an answer
START_S = 60.0  # in which a rank has imported torch
T = TypeVar("T")


class Here:
    """This machine. address: by which the others reach it."""

    def __init__(self, name: str, address: str, place: Place) -> None:
        self.name, self.address, self.nproc, self._master = name, address, place.nproc, place.master
        self._sink: wire.Sink | None = None
        self._meeting: socket.socket | None = None
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
        found = [name for name, entries in network.interfaces().items() if entries and name in states]
        return tuple(sorted((name for name in found if states[name].isup), key=lambda name: name != first))

    def free_port(self) -> int:
        """Opens a port for the ranks to meet at, which the next trial's rank 0 inherits."""
        self._forget_port()
        self._meeting = network.bound(self.address, 0)
        return int(self._meeting.getsockname()[1])

    def _forget_port(self) -> None:
        if self._meeting:
            self._meeting.close()
        self._meeting = None

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
            listening = self._meeting.fileno() if self._meeting and not rank else None
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
        folder, found = Path(self._folder.name), []
        for rank, process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._until - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
            with suppress(OSError, UserError):
                found.append(read(RankTried, folder / f"tried-{rank}.json"))
                continue
            lines = (folder / f"log-{rank}.txt").read_text(errors="replace").strip().splitlines()
            how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
            found.append(
                RankTried(rank, error=f"the process ended ({how}): {lines[-1] if lines else 'it printed nothing'}")
            )
        self._ranks = []
        return tuple(found)

    def close(self) -> None:
        for _, process in self._ranks:
            process.kill()
            process.wait()
        self._forget_port()
        if self._sink:
            self._sink.close()
        self._folder.cleanup()


class Line:
    """A connection on which records go as lines of JSON. Raises ConnectionError where the other side is lost."""

    def __init__(self, stream: socket.socket, wait_s: float) -> None:
        stream.settimeout(wait_s)
        self._stream = stream
        self._file: IO[str] = stream.makefile("rw", encoding="utf-8", newline="\n")

    def say(self, record: Any) -> None:
        try:
            self._file.write(json.dumps(with_schema(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def hear(self, kind: type[T]) -> T:
        try:
            value = json.loads(self._file.readline())
            if value.pop(KEY, None) != SCHEMA:
                raise ConnectionError("it is a samestep of another version")
            return from_json(kind, value, "what it says")
        except (OSError, ValueError, AttributeError, UserError) as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._stream.close()


class Remote:
    """Another machine, which does what it is asked over a connection."""

    def __init__(self, line: Line, name: str, greeting: Greeting) -> None:
        self.name, self.address, self.nproc = name, greeting.address, greeting.place.nproc
        self.line = line

    def _ask(self, request: Request) -> Answer:
        try:
            self.line.say(request)
            return self.line.hear(Answer)
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
            self.line.say(Request("stop", code=code))
        self.line.close()


def serve(line: Line, machine: Here) -> int | None:
    """Does what the first machine asks, until it says stop. Returns its exit code; None where it is lost."""
    try:
        while True:
            request = line.hear(Request)
            if request.do == "stop":
                return request.code
            line.say(_done(machine, request))
    except ConnectionError:
        return None


def _done(machine: Here, request: Request) -> Answer:
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


def welcome(listening: socket.socket, count: int, wait_s: float) -> list[tuple[Line, Greeting]]:
    """Waits for `count` machines. Returns those that have come within `wait_s` seconds."""
    came: list[tuple[Line, Greeting]] = []
    until = time.monotonic() + wait_s
    while len(came) < count and (left := until - time.monotonic()) > 0:
        listening.settimeout(left)
        try:
            stream, _ = listening.accept()
        except TimeoutError:
            break
        line = Line(stream, 10.0)
        try:
            came.append((line, line.hear(Greeting)))
            stream.settimeout(ANSWER_S)
        except ConnectionError:  # somebody who looked whether the port is open
            line.close()
    return came


def greet(place: Place, probed: Sequence[Probed], wait_s: float) -> tuple[Line | None, Here, Dialled]:
    """Comes to the first machine, which may not listen yet. Returns the connection; None, and how the last try ended,
    where there is none within `wait_s` seconds."""
    until = time.monotonic() + wait_s
    route = network.route_to(place.master)
    here = Here(socket.gethostname(), route[1] if route else "127.0.0.1", place)
    while (dialled := wire.dial(place.master, place.port)).outcome != "open":
        if time.monotonic() > until or dialled.outcome == "unknown name":
            return None, here, dialled
        time.sleep(0.2)
    line = Line(socket.create_connection((place.master, place.port), timeout=ANSWER_S), ANSWER_S)
    line.say(Greeting(here.name, here.address, place, tuple(probed)))
    return line, here, dialled


def named(here: Here, came: Sequence[tuple[Line, Greeting]]) -> list[Remote]:
    """Returns the other machines in the order of their numbers, each with a name of its own."""
    used, found = {here.name}, []
    for line, greeting in sorted(came, key=lambda each: (each[1].place.node is None, each[1].place.node or 0)):
        name, number = greeting.name, 2
        while name in used:
            name, number = f"{greeting.name} ({number})", number + 1
        used.add(name)
        found.append(Remote(line, name, greeting))
    return found
