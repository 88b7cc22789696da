"""What a command and its fork server send each other: a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ForkRequest:
    """A worker to fork: its arguments, environment, working folder, and the file that its output is appended to."""

    arguments: list[str]
    environment: Mapping[str, str]
    folder: str
    output: str


@dataclass(frozen=True)
class ForkAnswer:
    """What the server answers: first, once, the number of its threads and its pid; then a worker's pid, and its exit
    code when it has ended."""

    threads: int | None = None
    pid: int = 0
    code: int | None = None


def line_of(message: ForkRequest | ForkAnswer) -> bytes:
    """Returns a message as its line."""
    return f"{json.dumps(asdict(message))}\n".encode()


def request_of(line: bytes) -> ForkRequest:
    return ForkRequest(**json.loads(line))


def answer_of(line: bytes) -> ForkAnswer:
    return ForkAnswer(**json.loads(line))
