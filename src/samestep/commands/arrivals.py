"""How the machines of a doctor find each other: the first listens, the others connect, all prove a token."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from samestep.commands.authenticated_connection import Connection, WrongToken
from samestep.commands.fleet import ANSWER_S, MOST_RANKS, LocalMachine
from samestep.errors import UserError
from samestep.records.doctor import Greeting, Probed
from samestep.world import network, wire
from samestep.world.checks import LaunchInfo
from samestep.world.machine import Dialled
from samestep.world.token import TOKEN

GREETING_S = 60.0  # in which a machine that has proved its token has sent its facts
MOST_GREETING = 64  # connections at a time that have not proved the token
MOST_PROBED = 200
MOST_SILENT = 3  # attempts in which the port is open and no doctor answers


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
                raise ConnectionError("its greeting is out of bounds")
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
    here = LocalMachine(socket.gethostname(), route[1] if route else "127.0.0.1", info, token)
    silent = 0
    while True:
        dialled = wire.dial(info.master, info.port)
        if dialled.outcome == "open":
            try:
                stream = socket.create_connection((info.master, info.port), timeout=ANSWER_S)
                connection = Connection(stream, token, "other", ANSWER_S)
                connection.send(Greeting(here.name, info.node, info.nproc, tuple(probed)))
                here.address = connection.addresses[0]
                return connection, here, dialled
            except WrongToken as error:
                here.close()
                raise UserError(
                    f"the doctor at {info.master}:{info.port} has another {TOKEN} than this machine ({error}); type "
                    f"here the line that it has printed, or set the same {TOKEN} on each machine"
                ) from None
            except OSError:
                silent += 1
        if time.monotonic() > until or dialled.outcome == "unknown name" or silent == MOST_SILENT:
            return None, here, dialled
        time.sleep(0.2)
