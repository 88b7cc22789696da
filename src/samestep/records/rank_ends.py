"""What a rank of a foreign script, or a launcher's process, has written of its waits and of its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from samestep.message import Message

WAIT = "wait-{}.json"  # a process's id
END = "end-rank{}.json"


@dataclass(frozen=True)
class Wait:
    """A process that waits for others before any training begins, or waited until it failed."""

    kind: Literal["rank", "machine", "store"]
    """Whose coming it waits for: ranks in init_process_group, machines in torchrun's rendezvous, or what another
    process writes into a store."""

    pid: int
    """The process."""

    since: float
    """When it began to wait, in seconds of Unix time."""

    where: str
    """The function that waits, as 'init_process_group'."""

    line: str | None = None
    """The line of the user's code that called it."""

    number: int = 0
    """The number of this rank or machine."""

    size: int = 0
    """How many ranks or machines there are to be; 0: not known."""

    local: list[int] = field(default_factory=list)
    """The ranks that the launcher has started on this machine. Empty: not known."""

    launched: int = 0
    """How many ranks the launcher says that it has started, on all machines. 0: not known."""

    hosts: list[str] = field(default_factory=list)
    """The machines that have come. Empty: not known."""

    endpoint: str | None = None
    """Where they are to meet, as 'localhost:29500'."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank has left Python."""

    rank: int
    """The rank's number."""

    left: Message | None
    """By which line it left, and the exception that its script had caught before. None: neither is known."""

    entered: str | None
    """The collective that it entered last, as 'all_reduce #12'. None: not known."""
