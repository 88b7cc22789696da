"""A connection between two machines, each of which proves first that it knows the launch's token.

Both send a random text, then each a proof of both texts; the token itself is never sent. Each later line has a proof of
its place in the conversation and of its text, so none can be added, changed or sent again. Lines are not encrypted.
A line is JSON of bounded size, depth and numbers, and must be complete within a time.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any, Literal, TypeVar

from samestep.doctor import token as tokens
from samestep.errors import UserError
from samestep.message import Message, as_said, message
from samestep.records.files import as_json, from_record, with_schema

T = TypeVar("T")
Side = Literal["first", "other"]
OTHER: dict[Side, Side] = {"first": "other", "other": "first"}
HANDSHAKE_S: dict[Side, float] = {"first": 10.0, "other": 30.0}  # the first machine may be busy; strangers do not wait
LONGEST_PROOF = 128  # bytes of a line before the other side is known
LONGEST_LINE = 1 << 22  # bytes
DEEPEST, MOST_VALUES, LONGEST_TEXT, GREATEST = 24, 200_000, 50_000, 2.0**63
REFUSED = "refused"


class Lost(ConnectionError):
    """The other side is lost, or sends what is no record. message: why."""

    def __init__(self, why: Message) -> None:
        super().__init__(why)
        self.message = why

    def __str__(self) -> str:
        return str(self.message)


class WrongToken(Lost):
    """The other side does not know the token, or says that this one does not."""


class Connection:
    """Sends and receives records over a stream. Raises Lost where the other side is lost, sends what is no record, or
    does not know the token.

    side: which one this is. wait_s: in which a line must have been sent or received.
    """

    def __init__(self, stream: socket.socket, token: str, side: Side, wait_s: float) -> None:
        self._stream, self._side, self.wait_s = stream, side, wait_s
        self._unread, self._key = bytearray(), ""
        self._counts: dict[Side, int] = {"first": 0, "other": 0}
        try:
            self._meet(token, time.monotonic() + HANDSHAKE_S[side])
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, str]:
        """This side's address and the other's."""
        local, remote = self._stream.getsockname(), self._stream.getpeername()
        return (local[0], remote[0]) if isinstance(local, tuple) else ("", "")

    def _meet(self, token: str, until: float) -> None:
        """Proves to the other side that this one knows the token, after the other has where this is the first side."""
        sent = tokens.nonce()
        self._write(sent, until)
        received = self._read(LONGEST_PROOF, until)
        if len(received) != len(sent) or not received.isalnum():
            raise Lost(message("peer_is_another_program"))
        nonces = (sent, received) if self._side == "first" else (received, sent)
        if self._side == "other":
            self._write(tokens.proof(token, "other", *nonces), until)
        said = self._read(LONGEST_PROOF, until)
        if not tokens.proves(said, token, OTHER[self._side], *nonces):
            if self._side == "first":
                self._write(REFUSED, until)
            knows_another = self._side == "first" or said == REFUSED
            raise WrongToken(message("peer_has_another_token" if knows_another else "peer_has_no_token"))
        if self._side == "first":
            self._write(tokens.proof(token, "first", *nonces), until)
        self._key = tokens.proof(token, "conversation", *nonces)

    def send(self, record: Any) -> None:
        text = json.dumps(with_schema(record))
        self._write(f"{self._proof(self._side, text)} {text}", time.monotonic() + self.wait_s)

    def receive(self, kind: type[T]) -> T:
        said, _, text = self._read(LONGEST_LINE, time.monotonic() + self.wait_s).partition(" ")
        if not tokens.proves(said, self._key, *self._place(OTHER[self._side]), text):
            raise Lost(message("line_is_of_another_machine"))
        return parsed(kind, text)

    def _proof(self, side: Side, text: str) -> str:
        return tokens.proof(self._key, *self._place(side), text)

    def _place(self, side: Side) -> tuple[str, str]:
        self._counts[side] += 1
        return side, str(self._counts[side])

    def _write(self, line: str, until: float) -> None:
        try:
            self._stream.settimeout(max(until - time.monotonic(), 1e-3))
            self._stream.sendall(line.encode() + b"\n")
        except OSError as error:
            raise Lost(as_said(str(error))) from None

    def _read(self, longest: int, until: float) -> str:
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            if len(self._unread) > longest:
                raise Lost(message("line_is_too_long", bytes=longest))
            searched = len(self._unread)
            try:
                self._stream.settimeout(max(until - time.monotonic(), 1e-3))
                block = self._stream.recv(1 << 16)
            except OSError as error:
                raise Lost(as_said(str(error))) from None
            if not block:
                raise Lost(message("peer_has_closed_the_connection"))
            self._unread += block
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        if len(line) > longest:
            raise Lost(message("line_is_too_long", bytes=longest))
        return line.decode(errors="replace")

    def close(self) -> None:
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._stream.close()


def parsed(kind: type[T], text: str) -> T:
    """Returns the record that a line of JSON is. Raises Lost for any other line."""
    try:
        value = json.loads(text)
        if why := why_out_of_bounds(value):
            raise Lost(why)
        record = from_record(kind, value, "what it sends", "install the same on each machine")
    except UserError as error:
        raise Lost(error.message) from None
    except (ValueError, RecursionError) as error:
        raise Lost(as_said(str(error).partition("\n")[0][:300])) from None
    if why := why_out_of_bounds(as_json(record)):  # texts such as 'NaN' are read as numbers
        raise Lost(why)
    return record


def why_out_of_bounds(value: Any) -> Message | None:
    """Returns why plain values are nested too deeply, too many, too long, or no finite numbers; None where they are in
    bounds."""
    level, count = [value], 0
    for _ in range(DEEPEST):
        count += len(level)
        if not level:
            return None
        if count > MOST_VALUES:
            return message("values_are_too_many", values=MOST_VALUES)
        inner: list[Any] = []
        for element in level:
            if isinstance(element, dict):
                inner += [*element, *element.values()]
            elif isinstance(element, list | tuple):
                inner += element
            elif isinstance(element, str) and len(element) > LONGEST_TEXT:
                return message("text_is_too_long", characters=len(element))
            elif isinstance(element, int | float) and not abs(element) <= GREATEST:  # nor NaN
                return message("number_is_not_finite")
        level = inner
    return message("values_are_nested_too_deeply", levels=DEEPEST)
