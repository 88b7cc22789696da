"""Measures the network between two processes: whether a connection opens, is refused or is dropped, and its speed."""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import suppress

from samestep.world import token as tokens
from samestep.world.machine import Dialled, Flow, Outcome

DIAL_S = 2.0
SKIPPED_S = 0.25  # of a stream's begin, in which the buffers fill
BLOCK = bytes(1 << 16)
STALL_S = 10.0
LONGEST_STREAM_S = 60.0
MOST_STREAMS = 64  # at a time
LONGEST_LINE = 160  # bytes: a random text and its proof
SEND_BUFFER = 1 << 19  # bytes; a larger one takes long to empty on a slow link
OUTCOMES: dict[int, Outcome] = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "dropped"}
OUTCOMES |= {errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route", errno.EACCES: "refused"}


def dial(address: str, port: int, wait_s: float = DIAL_S) -> Dialled:
    """Opens a connection and closes it."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=wait_s):
            return Dialled("open", time.monotonic() - began)
    except socket.gaierror as error:
        return Dialled("unknown name", time.monotonic() - began, str(error))
    except TimeoutError:
        return Dialled("dropped", time.monotonic() - began, f"no answer within {wait_s:g} s")
    except OSError as error:
        return Dialled(OUTCOMES.get(error.errno or 0, "error"), time.monotonic() - began, error.strerror or str(error))


def send(address: str, port: int, seconds: float, token: str = "") -> Flow:
    """Sends bytes to a Sink for some seconds. Returns what arrived there. Sends none to a port that is no Sink of the
    launch with this token."""
    sent = 0
    try:
        with socket.create_connection((address, port), timeout=DIAL_S) as stream:
            nonce = tokens.nonce()
            stream.sendall(f"{nonce} {tokens.proof(token, 'send', nonce)}\n".encode())
            if not tokens.proves(_line(stream), token, "count", nonce):
                return Flow(0, 0.0, "another program has this port")
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sent += stream.send(BLOCK)
            stream.shutdown(socket.SHUT_WR)
            received, _, took = _line(stream).partition(" ")
            counted = Flow(int(received), float(took))
            believable = 0 <= counted.received <= sent and 0 <= counted.seconds <= 2 * STALL_S + seconds
            return counted if believable else Flow(0, 0.0, "it counts what has not been sent")
    except TimeoutError:
        return Flow(sent, 0.0, f"the stream stopped for {STALL_S:g} s after {sent} bytes")
    except (OSError, ValueError) as error:
        return Flow(sent, 0.0, str(error))


def _line(stream: socket.socket) -> str:
    """Reads a short line. Raises OSError where the stream ends before, or it does not end in time."""
    read = b""
    until = time.monotonic() + STALL_S
    while not read.endswith(b"\n"):
        stream.settimeout(max(until - time.monotonic(), 1e-3))
        if not (block := stream.recv(LONGEST_LINE - len(read))):
            raise ConnectionError("the stream has ended")
        read += block
    stream.settimeout(STALL_S)
    return read[:-1].decode(errors="replace")


class Sink:
    """A port that takes connections of the launch with this token, and answers each with the bytes and seconds of what
    arrived."""

    def __init__(self, address: str, token: str = "") -> None:
        self._token, self._free = token, threading.Semaphore(MOST_STREAMS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening.bind((address, 0))
        self._listening.listen(64)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listening.accept()
                if self._free.acquire(blocking=False):
                    threading.Thread(target=self._count, args=(stream,), daemon=True).start()
                else:
                    stream.close()

    def _count(self, stream: socket.socket) -> None:
        try:
            self._count_all(stream)
        finally:
            self._free.release()

    def _count_all(self, stream: socket.socket) -> None:
        counted, first, last = 0, 0.0, 0.0
        began = 0.0
        with stream, suppress(OSError):
            nonce, _, said = _line(stream).partition(" ")
            if not tokens.proves(said, self._token, "send", nonce):
                return
            stream.sendall(f"{tokens.proof(self._token, 'count', nonce)}\n".encode())
            until = time.monotonic() + LONGEST_STREAM_S
            while time.monotonic() < until and (block := stream.recv(1 << 18)):
                last = time.monotonic()
                began = began or last
                if last - began < SKIPPED_S:
                    first = last
                else:
                    counted += len(block)
            stream.sendall(f"{counted} {last - first:.6f}\n".encode())
