"""What hostile peers do, and what their victims do: the processes of benchmarks/hostile_peers.py.

    python benchmarks/hostile_acts.py PART FOLDER [WORD …]

Strangers do not know the doctor's token. Insiders do, as a machine of the launch that somebody has taken over.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from samestep.doctor import connection, fleet
from samestep.doctor.connection import Connection
from samestep.doctor.machine import LaunchInfo, Trial, TrialRecord
from samestep.doctor.records import Answer, Greeting, Probed, Request
from samestep.errors import UserError
from samestep.records.files import SCHEMA

TOKEN = "0123456789abcdef-of-the-benchmark"
PORT, MOST_S = 29500, 300.0  # a victim that takes longer hangs
STATE = "torch.rendezvous.samestep"


class Canary:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def canary(folder: str, peer: str) -> str:
    return str(Path(folder) / f"executed-{peer.replace(' ', '-')}")


# Strangers, who send bytes to whoever is at the other end.


def echo(stream: socket.socket) -> None:
    with suppress(OSError):
        while block := stream.recv(1 << 16):
            stream.sendall(block)


def drip(stream: socket.socket) -> None:
    with suppress(OSError):
        for _ in range(40):
            stream.sendall(b"0")
            time.sleep(0.1)


def reset(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def says(text: bytes) -> Callable[[socket.socket], None]:
    def send(stream: socket.socket) -> None:
        with suppress(OSError):
            stream.sendall(text)
            time.sleep(1)

    return send


NONCE, PROOF = b"0" * 32 + b"\n", b"0" * 64 + b"\n"
FORGED = json.dumps({"schema": SCHEMA, "name": "h1", "node": 1, "nproc": 1, "probed": []}).encode() + b"\n"
START = (
    json.dumps({"schema": SCHEMA, "do": "start", "trial": {"variables": {"BROWSER": "/bin/sh -c id"}}}).encode() + b"\n"
)


def strangers(folder: str) -> dict[str, Callable[[socket.socket], None]]:
    return {
        "says nothing": lambda stream: time.sleep(2),
        "half a line": says(b"0" * 20),
        "a byte now and then": drip,
        "closes": reset,
        "binary": says(os.urandom(1 << 20)),
        "zeros": says(bytes(1 << 16)),
        "an HTTP request": says(b"GET / HTTP/1.1\r\nHost: h0\r\n\r\n"),
        "a TLS hello": says(bytes.fromhex("16030100c8010000c40303") + bytes(190)),
        "a line of 64 MB": says(b"x" * (64 << 20)),
        "JSON a million deep": says(b"[" * 1_000_000 + b"\n"),
        "a record without a proof": says(FORGED),
        "a request without a proof": says(START),
        "a pickle": says(pickle.dumps(Canary(canary(folder, "a pickle"))) + b"\n"),
        "a pickle in a line": says(
            base64.b64encode(pickle.dumps(Canary(canary(folder, "a pickle in a line")))) + b"\n"
        ),
        "a forged proof": says(NONCE + PROOF),
        "a forged proof and a record": says(NONCE + PROOF + PROOF[:-1] + b" " + FORGED),
        "says back what it is told": echo,
        "a word of ours": says(b"refused\n" * 100),
        "half a UTF-8 letter": says(b"\xc3" * 32 + b"\n" + b"\xff" * 64 + b"\n"),
    }


# Insiders, who know the token.

FACTS: dict[str, Any] = {
    "facts of NaN": "NaN",
    "facts nested deep": json.loads("[" * 20 + "]" * 20),
    "facts of another kind": {"nproc": "many"},
}


def insider_machines() -> dict[str, Callable[[Connection], None]]:
    """What a machine answers to the first one, once it is let in."""

    def greets(greeting: Greeting) -> Callable[[Connection], None]:
        def act(connection: Connection) -> None:
            connection.send(greeting)
            while connection.receive(Request).do != "stop":
                connection.send(Answer(port=22, seconds=1e12, names=("eth0; id",), ranks=(TrialRecord(7),)))

        return act

    def then(*lines: bytes) -> Callable[[Connection], None]:
        def act(connection: Connection) -> None:
            connection.send(Greeting("h1", None, 1, ()))
            connection.receive(Request)
            with suppress(OSError):
                for line in lines:
                    connection._stream.sendall(line)
            time.sleep(2)

        return act

    acts = {name: greets(Greeting("h1", None, 1, tuple(Probed(c, f) for c in CHECKS))) for name, f in FACTS.items()}
    acts |= {
        "a name that colours": greets(Greeting("\x1b[31mh1\nsamestep: rm -rf /", None, 1, ())),
        "a billion ranks": greets(Greeting("h1", None, 10**9, ())),
        "minus one rank": greets(Greeting("h1", -1, -1, ())),
        "a million facts": greets(Greeting("h1", None, 1, (Probed("clock", list(range(300_000))),))),
        "an answer without a proof": then(FORGED),
        "an answer without an end": then(b"x" * (8 << 20)),
        "leaves": then(),
    }
    return acts


CHECKS = ("machines", "cpus", "interfaces", "master", "versions")
TRIAL = Trial("10.77.0.10", 40000, 2, 1, 1, {}, "cpu", 5.0)


def insider_requests(folder: str) -> dict[str, list[Request]]:
    """What a first machine that somebody has taken over asks another to do."""
    path = Path(folder) / "path"
    browser = f"/bin/sh -c 'mkdir {canary(folder, 'PYTHONWARNINGS and BROWSER')}' %s"
    meet = Request("meet", (("10.77.0.10", 40001), ("10.77.0.11", 40002)))
    start = lambda **changes: [meet, Request("start", trial=replace(TRIAL, **changes)), Request("ended")]  # noqa: E731
    return {
        "PYTHONWARNINGS and BROWSER": start(
            variables={"PYTHONWARNINGS": "error::antigravity.X", "BROWSER": browser, "GLOO_SOCKET_IFNAME": "eth0"}
        ),
        "PYTHONPATH": start(variables={"PYTHONPATH": str(path)}),
        "LD_PRELOAD": start(variables={"LD_PRELOAD": "/tmp/x.so"}),
        "NCCL_DEBUG_FILE": start(variables={"NCCL_DEBUG_FILE": canary(folder, "NCCL_DEBUG_FILE")}),
        "a shell in an interface": start(variables={"GLOO_SOCKET_IFNAME": "eth0; id"}),
        "a million ranks": start(local_size=10**6, size=10**6),
        "ranks that wait for ever": start(wait_s=1e15),
        "ranks that meet elsewhere": start(master="10.77.0.99"),
        "dials ssh": [meet, Request("dial", address="10.77.0.11", port=22)],
        "dials the cloud's secrets": [meet, Request("dial", address="169.254.169.254", port=80)],
        "sends for ever": [meet, Request("send", address="10.77.0.10", port=40001, seconds=1e15)],
        "meets a thousand machines": [Request("meet", tuple((f"10.0.{n}.1", 2000) for n in range(1000)))],
        "meets twice": [meet, meet],
    }


# The processes of the other user.


def together(play: Callable[[Any], None], acts: Iterable[Any]) -> None:
    threads = [threading.Thread(target=play, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def attack(folder: str) -> None:
    """Connects to the first machine as a crowd that says nothing, and as each stranger."""
    acts = strangers(folder)
    crowd = [socket.create_connection(("h0", PORT)) for _ in range(300)]

    def play(act: Callable[[socket.socket], None]) -> None:
        with suppress(OSError), socket.create_connection(("h0", PORT), timeout=5) as stream:
            act(stream)

    together(play, acts.values())
    assert len(crowd) == 300


def infiltrate() -> None:
    def play(act: Callable[[Connection], None]) -> None:
        with suppress(OSError):
            act(Connection(socket.create_connection(("h0", PORT)), TOKEN, "other", MOST_S))

    together(play, insider_machines().values())


def pose(folder: str) -> None:
    """Listens as the first machine would: at a port for each stranger, then for each insider."""
    acts: list[Callable[[socket.socket], None]] = list(strangers(folder).values())

    def asks(requests: list[Request]) -> Callable[[socket.socket], None]:
        def act(stream: socket.socket) -> None:
            with suppress(ConnectionError):
                connection = Connection(stream, TOKEN, "first", MOST_S)
                connection.receive(Greeting)
                for request in requests:
                    connection.send(request)
                    connection.receive(Answer)

        return act

    acts += [asks(requests) for requests in insider_requests(folder).values()]

    def listen(server: socket.socket, act: Callable[[socket.socket], None]) -> None:
        while True:
            stream, _ = server.accept()
            threading.Thread(target=act, args=(stream,), daemon=True).start()

    for number, act in enumerate(acts):
        server = socket.create_server(("10.77.0.10", PORT + 1 + number))
        threading.Thread(target=listen, args=(server, act), daemon=True).start()
    print("listening", flush=True)
    time.sleep(10 * MOST_S)


def writes(folder: str) -> dict[str, dict[str, str]]:
    """What a stranger writes into the store of a rendezvous: peer -> key -> value."""
    pickled = pickle.dumps(Canary(canary(folder, "a pickle as torch's state")))
    return {
        "a pickle as torch's state": {STATE: base64.b64encode(pickled).decode()},
        "a raw pickle": {STATE: pickled.decode("latin1")},
        "no base64": {STATE: "\x00\x01"},
        "state a million deep": {STATE: base64.b64encode(b"[" * 1_000_000).decode()},
        "state of 4 MB": {STATE: base64.b64encode(b" " * (4 << 20)).decode()},
        "state of numbers too great": {STATE: base64.b64encode(b'{"round": 1' + b"0" * 5000 + b"}").decode()},
        "another number of machines": {"samestep/machines/machines": "\x1b[31m9\n"},
        "another training": {"samestep/machines/request": "x" * 100_000, "samestep/machines/complete": "1"},
    }


RENDEZVOUS = tuple(writes(""))
CONTROL = "control: torch's own backend"


def scribble(folder: str) -> None:
    """Writes into the store of each rendezvous that it is told of by a line, 'PORT PEER', for a while."""
    from torch._C._distributed_c10d import TCPStore

    print("ready", flush=True)
    for line in sys.stdin:
        port, _, peer = line.strip().partition(" ")
        written = writes(folder)[RENDEZVOUS[0] if peer == CONTROL else peer]
        with suppress(Exception):
            store = TCPStore("10.77.0.10", int(port), None, False, timedelta(seconds=MOST_S), wait_for_workers=False)
            for _ in range(200):
                for key, value in written.items():
                    store.set(key, value)
                print("written", flush=True)
                time.sleep(0.05)


def join(*peers: str) -> None:
    """The victims of strangers: what torchrun calls, on the first of two machines, once for each peer."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from samestep.rank.rendezvous import handler

    for number, peer in enumerate(peers):
        elastic, port = peer == "another training", PORT + 100 + number
        config = {"join_timeout": 3, "read_timeout": 5, "is_host": "true", "last_call_timeout": 1}
        config |= {"request": "f00d"} if elastic else {}
        made = RendezvousParameters(
            "c10d", f"10.77.0.10:{port}", "samestep", 1 if elastic else 2, 2, "10.77.0.10", **config
        )
        try:
            if peer == CONTROL:
                backend, store = create_backend(made)
                rendezvous: Any = create_handler(store, backend, made)
            else:
                rendezvous = handler()(made)
            print(f"listening\t{port}", flush=True)
            sys.stdin.readline()
            rendezvous.next_rendezvous()
            ended = "joined"
        except Exception as error:
            ended = f"{type(error).__name__}: {str(error)[:120]}"
        print(f"ended\t{ended}", flush=True)
    os._exit(0)


def dial(folder: str) -> None:
    """The victim: what a doctor does on another machine than the first, once for each port."""
    connection.HANDSHAKE_S["other"] = 1.5  # a doctor waits for 30 s: a first machine may be busy
    for number, peer in enumerate([*strangers(folder), *insider_requests(folder)]):
        began = time.monotonic()
        info = LaunchInfo(nproc=1, nnodes=2, node=1, master="10.77.0.10", port=PORT + 1 + number)
        try:
            joined, machine, dialled = fleet.connect(info, [], 3.0, TOKEN)
            ended = f"{dialled.outcome}, no doctor there"
            if joined:
                ended = f"left, code {fleet.serve(joined, machine, info)}"
            machine.close()
        except UserError as error:
            ended = str(error)
        print(f"ended\t{peer}\t{ended}\t{time.monotonic() - began:.1f}", flush=True)


PARTS: dict[str, Callable[..., None]] = {
    "attack": attack,
    "infiltrate": lambda folder: infiltrate(),
    "pose": pose,
    "dial": dial,
    "scribble": scribble,
    "join": lambda folder, *peers: join(*peers),
}


if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
