"""Says who is absent while a command's processes wait for others before any training begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.errors import UserError
from samestep.launch import stacks
from samestep.launch.hang import Hang
from samestep.message import Message, message
from samestep.records.files import read
from samestep.records.rank_ends import WAIT, Wait
from samestep.world.regular_files import paths_in

RANK = "RANK"  # the environment variable by which launchers number their processes
NO_REASONS: Mapping[int, Message] = {}


@dataclass(frozen=True)
class Found:
    """What the processes of the command tell beside their waits. started: rank -> the process whose environment has its
    number. unreached: the waits whose process is connected to nobody at their endpoint, by pid."""

    started: Mapping[int, int]
    unreached: frozenset[int]


NOTHING_FOUND = Found({}, frozenset())


class FirstWaits:
    """The first waits of a command, as its processes write them into `folder`, and how long each has lasted.

    hang: what was told of those that go on. told_s: how long they had lasted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waited_s: dict[tuple[int, float], float] = {}
        self.hang: Hang | None = None
        self.told_s = 0.0

    def update(self, passed_s: float) -> list[Wait]:
        """Returns the waits of processes that live. passed_s: seconds since the last call."""
        waits = [wait for wait in self.all() if stacks.is_alive(wait.pid)]
        before = self._waited_s
        # A later wait in a store is another one: a script may ask it again and again.
        self._waited_s = before | {_key(wait): before.get(_key(wait), 0.0) + passed_s for wait in waits}
        return waits

    def go_on(self) -> bool:
        """Whether all have come: one that was ended in its wait leaves its file."""
        return not self.all()

    def all(self) -> list[Wait]:
        """Returns the waits, also of processes that have failed in theirs or were ended there; of a rank that was
        started again the latest."""
        waits = dict[tuple[str, int], Wait]()
        for path in paths_in(self._folder, WAIT.format("[0-9]*")):
            with suppress(OSError, UserError):  # it waits no more
                wait = read(Wait, path)
                key = wait.kind, wait.number if wait.kind == "rank" else wait.pid
                waits[key] = max(wait, waits.get(key, wait), key=lambda one: one.since)
        return [*waits.values()]

    def longest_s(self, waits: Sequence[Wait]) -> float:
        """Returns how long the first of these has waited."""
        return max((self._waited_s.get(_key(wait), 0.0) for wait in waits), default=0.0)


def _key(wait: Wait) -> tuple[int, float]:
    return wait.pid, wait.since


def look(waits: Sequence[Wait]) -> Found:
    """Looks at the processes of this command, and at their connections."""
    started = dict[int, int]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            number = process.environ().get(RANK, "")
            # A number that this command has inherited is another launcher's.
            if number.isdigit() and number != os.environ.get(RANK):
                started.setdefault(int(number), process.pid)
    return Found(started, frozenset(wait.pid for wait in waits if _reaches_nobody(wait)))


def _reaches_nobody(wait: Wait) -> bool:
    """Whether a process that waits has no connection to the port at which all meet, and does not listen there."""
    _, _, port = (wait.endpoint or "").rpartition(":")
    if not port.isdigit() or not int(port):  # 0: any free one
        return False
    try:
        process = psutil.Process(wait.pid)
        connections = getattr(process, "net_connections", None) or process.connections  # before psutil 6
        found = connections("tcp")
    except psutil.Error:
        return False
    ends = [end for one in found if one.status in ("ESTABLISHED", "LISTEN") for end in (one.laddr, one.raddr) if end]
    return all(end.port != int(port) for end in ends)


def explain(
    waits: Sequence[Wait], waited_s: float, found: Found = NOTHING_FOUND, left: Mapping[int, Message] = NO_REASONS
) -> Hang:
    """Returns who is absent. waited_s: how long they have waited. left: why ranks of here have left."""
    if machines := [wait for wait in waits if wait.kind == "machine"]:
        return Hang((), _machines(machines[0], waited_s, found))
    if ranks := sorted((wait for wait in waits if wait.kind == "rank"), key=lambda wait: wait.number):
        return _ranks(ranks, waited_s, found, left)
    wait = waits[0]
    fields = {"process": wait.pid, "where": wait.where, "line": wait.line, "waited_s": waited_s}
    return Hang((), message("process_waits_in_store", **fields, unreached=_unreached(waits[:1], found)))


def _machines(wait: Wait, waited_s: float, found: Found) -> Message:
    return message(
        "machines_have_not_come",
        number=wait.number,
        size=wait.size,
        waited_s=waited_s,
        endpoint=wait.endpoint,
        came=len(wait.hosts) or None,
        hosts=wait.hosts,
        unreached=_unreached([wait], found),
    )


def _ranks(waits: Sequence[Wait], waited_s: float, found: Found, left: Mapping[int, Message]) -> Hang:
    here, first = [wait.number for wait in waits], waits[0]
    size = max(wait.size for wait in waits)
    absent = [rank for rank in range(size) if rank not in here]
    launched = max(wait.launched for wait in waits)  # the script may name a greater world size
    of_this_machine = {rank for wait in waits for rank in wait.local} | {*range(launched, size)}
    ours = tuple(rank for rank in absent if rank in of_this_machine)
    fields = {"ranks": here, "where": first.where, "line": first.line, "waited_s": waited_s, "size": size}
    if not absent:
        endpoints = sorted({wait.endpoint for wait in waits if wait.endpoint})
        return Hang((), message("all_ranks_wait_to_meet", **fields, endpoints=endpoints if endpoints[1:] else None))
    unreached = None if 0 in here else _unreached(waits, found)
    if not ours:
        return Hang((), message("ranks_of_other_machines_have_not_come", **fields, absent=absent, unreached=unreached))
    started = [rank for rank in ours if rank in found.started]
    gone = next((rank for rank in ours if rank in left), None)
    said = message(
        "ranks_never_came",
        **fields,
        absent=list(ours),
        launched=launched if 0 < launched < size else None,
        started=started,
        processes=[found.started[rank] for rank in started],
        gone=gone,
        why=None if gone is None else left[gone],
        unreached=unreached,
    )
    return Hang(ours, said)


def _unreached(waits: Sequence[Wait], found: Found) -> str | None:
    """Returns the endpoint at which a process that waits has found nobody."""
    return next((wait.endpoint for wait in waits if wait.pid in found.unreached), None)


def has_absent(waits: Sequence[Wait]) -> bool:
    """Whether one that these wait for has not come, as far as they tell."""
    ranks = [wait for wait in waits if wait.kind == "rank"]
    return not ranks or len({wait.number for wait in ranks}) < max(wait.size for wait in ranks)


def may_yet_come(hang: Hang, found: Found) -> bool:
    """Whether each absent rank has been started, and has not come to its first wait yet: it may import or load."""
    return bool(hang.ranks) and all(rank in found.started for rank in hang.ranks)
