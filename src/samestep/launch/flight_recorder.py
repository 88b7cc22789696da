"""Reads from a rank's flight recorder which collectives it has entered, and which it waits in.

The recorder numbers the collectives of each process group on each rank alike, unless the ranks take different branches.
Gloo never marks a collective as started or completed, only as retired: until then the rank waits in it.
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from pathlib import Path

from samestep.records.flight_recorder import entries_of, socket_of
from samestep.world.connections import connect

ANSWER_S = 2.0
DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered. group: its process group. created_ns: since 1970. sizes: of its inputs."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    created_ns: int
    retired: bool

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}" + (f" of group {self.group}" if self.group != DEFAULT_GROUP else "")

    @property
    def is_default(self) -> bool:
        """Whether it is of the group that holds all ranks."""
        return self.group == DEFAULT_GROUP

    @property
    def what(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """What ranks must have in common in one collective."""
        return self.operation, self.sizes if self.operation in EQUAL_SIZES else ()


EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Recorded:
    """What a rank's recorder reports. last: group -> the number of the collective that it entered last."""

    last: dict[str, int]
    waiting: tuple[Collective, ...]

    @property
    def first_waiting(self) -> Collective | None:
        return min(self.waiting, key=lambda each: each.created_ns, default=None)


def ask(folder: Path, rank: int) -> Recorded | None:
    """Asks the recorder of a rank of this machine. None where it does not answer: it has none, or is stopped."""
    try:
        text = _post(socket_of(folder, rank))
        return recorded(text)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def recorded(text: str) -> Recorded:
    """Reads a recorder's trace. Raises ValueError where the text is none."""
    seen = [
        Collective(
            entry.group,
            entry.collective_seq_id,
            entry.operation,
            entry.input_sizes,
            entry.time_created_ns,
            entry.retired,
        )
        for entry in entries_of(text)
        if not entry.is_p2p
    ]
    last: dict[str, int] = {}
    for each in seen:
        last[each.group] = max(each.number, last.get(each.group, 0))
    return Recorded(last, tuple(each for each in seen if not each.retired))


def _post(path: Path) -> str:
    with connect(path, ANSWER_S) as connection:
        client = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
        client.sock = connection
        client.request("POST", "/handler/fr_trace_json")
        return client.getresponse().read().decode()
