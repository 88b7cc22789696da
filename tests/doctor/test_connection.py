"""A connection that proves a token on both sides: strangers, other tokens, lines that are changed or too much."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from peers import TOKEN, meet

from budget import budget
from samestep.doctor import connection
from samestep.doctor import token as tokens
from samestep.doctor.connection import Connection, Lost, WrongToken, parsed, why_out_of_bounds
from samestep.doctor.records import Answer, Request
from samestep.message import Message
from samestep.records.files import SCHEMA


def suppressed(function: Callable[..., object], *args: object) -> None:
    with suppress(OSError):
        function(*args)


def test_records_cross_a_connection() -> None:
    ends = socket.socketpair()
    first, second = meet(ends)
    for number in (1, 2):
        first.send(Request("dial", address="10.0.0.2", port=number))
        assert second.receive(Request).port == number
        second.send(Answer(names=("eth0",)))
        assert first.receive(Answer) == Answer(names=("eth0",))
    first.close()
    with pytest.raises(ConnectionError):
        second.receive(Request)
    second.close()


def test_another_token_is_refused_on_both_sides_and_none_is_sent() -> None:
    ends = socket.socketpair()
    with pytest.raises(WrongToken):
        meet(ends, other_token="another token of a doctor")
    local, remote = socket.socketpair()
    threading.Thread(target=suppressed, args=(Connection, local, TOKEN, "other", 1.0)).start()
    remote.sendall(b"0" * 32 + b"\n")
    received = b""
    while received.count(b"\n") < 2:
        received += remote.recv(1000)
    assert TOKEN.encode() not in received and len(received) == 32 + 64 + 2
    remote.close()


def test_a_proof_of_an_older_conversation_is_worth_nothing() -> None:
    """Who has listened to another machine, or is between two, cannot speak for it: not at the beginning, nor later."""
    ends = socket.socketpair()
    nonces = "0" * 32, "1" * 32
    ends[1].sendall(f"{nonces[1]}\n{tokens.proof(TOKEN, 'other', *nonces)}\n".encode())
    with pytest.raises(WrongToken):
        Connection(ends[0], TOKEN, "first", budget())


@pytest.mark.parametrize("how", ["again", "changed", "back"])
def test_a_line_is_of_its_place_and_its_text(how: str) -> None:
    first, second = meet(ends := socket.socketpair())
    first.send(Request("now"))
    line = ends[1].recv(1000)
    ends[0].sendall(line.replace(b'"now"', b'"stop"') if how == "changed" else line)
    if how == "again":
        ends[0].sendall(line)
        assert second.receive(Request).do == "now"
    if how == "back":
        ends[1].sendall(line)
        second = first
    assert why_lost(lambda: second.receive(Request)).id == "line_is_of_another_machine"


@pytest.mark.parametrize(
    "said",
    [b"", b"\n", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 200, b"0" * 1000, b"0" * 32 + b"\n" + b"0" * 64 + b"\n", b"0"],
    ids=["nothing", "empty", "http", "binary", "long", "forged", "unfinished"],
)
def test_a_stranger_is_turned_away(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that says nothing, or does not end its line."""
    ends = socket.socketpair()
    monkeypatch.setitem(connection.HANDSHAKE_S, "first", 0.3)
    ends[1].sendall(said)
    with pytest.raises(ConnectionError):
        Connection(ends[0], TOKEN, "first", budget())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "char 0"),
        ('{"schema": 1}', "schema"),
        ("[]", "schema"),
        ('{"schema": SCHEMA, "port": "x"}', "port"),
        ('{"schema": SCHEMA, "seconds": NaN}', "number_is_not_finite"),
        ('{"schema": SCHEMA, "seconds": "NaN"}', "number_is_not_finite"),
        ('{"schema": SCHEMA, "seconds": 1e999}', "number_is_not_finite"),
        ('{"schema": SCHEMA, "port": 1' + "0" * 400 + "}", "number_is_not_finite"),
        ('{"schema": SCHEMA, "port": 1' + "0" * 9000 + "}", ""),
        ('{"schema": SCHEMA, "names": ["' + "x" * 60_000 + '"]}', "text_is_too_long"),
        ("[" * 30 + "]" * 30, "values_are_nested_too_deeply"),
        ("[" * 100_000, ""),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_lost_machine(line: str, says: str) -> None:
    said = why_lost(lambda: parsed(Answer, line.replace("SCHEMA", str(SCHEMA))))
    assert says in f"{said.id} {said.fields}"


def why_lost(call: Callable[[], object]) -> Message:
    with pytest.raises(Lost) as raised:
        call()
    return raised.value.message


def test_a_line_without_an_end_and_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    monkeypatch.setattr(connection, "LONGEST_LINE", 1 << 17)
    first, _ = meet(ends)
    writer = threading.Thread(target=suppressed, args=(ends[1].sendall, b"x" * (1 << 24)))
    writer.start()
    assert why_lost(lambda: first.receive(Answer)).id == "line_is_too_long"
    first.close()
    writer.join(budget())
    slow = socket.socketpair()
    first, _ = meet(slow)
    first.wait_s = 0.3
    began, over = time.monotonic(), threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            slow[1].sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(ConnectionError, match="timed out"):
        first.receive(Answer)
    over.set()
    dripping.join(budget())
    assert time.monotonic() - began < budget()


def test_bounds_leave_what_a_doctor_says_as_it_is() -> None:
    assert not why_out_of_bounds({"a": [1, -1.5, True, None, "x" * 1000, {"b": {"c": [0] * 10_000}}]})
    said = why_out_of_bounds([[0] * 1000] * 300)
    assert said and said.id == "values_are_too_many"
