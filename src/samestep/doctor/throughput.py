"""Measures the speed of a link: a stream of bytes to a Sink, which counts what arrives."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from samestep.doctor import token as tokens
from samestep.doctor.machine import Flow
from samestep.world.network import DIAL_S

SKIPPED_S = 0.25  # of a stream's begin, in which the buffers fill
BLOCK = bytes(1 << 16)
STALL_S = 10.0
LONGEST_STREAM_S = 60.0
MOST_STREAMS = 64  # at a time
LONGEST_LINE = 160  # bytes: a random text and its proof
SEND_BUFFER = 1 << 19  # bytes; a larger one takes long to empty on a slow link


def send(address: str, port: int, seconds: float, token: str = "") -> Flow:
    """Sends bytes to a Sink for some seconds. Returns what arrived there. Sends none to a port that is no Sink of the
    launch with this token."""
    sent = 0
    try:
        with socket.create_connection((address, port), timeout=DIAL_S) as stream:
            nonce = tokens.nonce()
            stream.sendall(f"{nonce} {tokens.proof(token, 'send', nonce)}\n".encode())
            if not tokens.proves(_read_line(stream), token, "count", nonce):
                return Flow(0, 0.0, "another program")
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sent += stream.send(BLOCK)
            stream.shutdown(socket.SHUT_WR)
            received, _, took = _read_line(stream).partition(" ")
            counted = Flow(int(received), float(took))
            believable = 0 <= counted.received <= sent and 0 <= counted.seconds <= 2 * STALL_S + seconds
            return counted if believable else Flow(0, 0.0, "miscounted")
    except TimeoutError:
        return Flow(sent, 0.0, "stopped")
    except (OSError, ValueError) as error:
        return Flow(sent, 0.0, "lost", str(error))


def _read_line(stream: socket.socket) -> str:
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
        counted, began, first, last = 0, 0.0, 0.0, 0.0
        with stream, suppress(OSError):
            nonce, _, said = _read_line(stream).partition(" ")
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
