"""Two machines of a doctor that know its token, connected."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from budget import budget
from samestep.doctor.connection import Connection

TOKEN = "a token of one doctor"
Ends = tuple[socket.socket, socket.socket]


def meet(ends: Ends, token: str = TOKEN, other_token: str = TOKEN) -> tuple[Connection, Connection]:
    """Returns the connections of the first machine and of another."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(Connection, ends[0], token, "first", budget())
        try:
            second = Connection(ends[1], other_token, "other", budget())
        finally:
            error = first.exception()
        assert error is None, error
        return first.result(), second
