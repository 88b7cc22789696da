"""The ranks of a process group: where each runs, which is lost, how they end together; through the rendezvous store.

None closes its connections while another still reads from them, and the rank that holds the store ends last.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from samestep.errors import LostPeer, Refused, UserError, printable
from samestep.message import message
from samestep.records.files import as_json, from_json
from samestep.records.launch_request import LaunchRequest
from samestep.world import World

POLL_S = 0.02
READ_S = 10.0  # seconds that the process with the store waits for processes that still read from it


def leave_together(
    store: Store, ranks: int, *, holds_store: bool, wait_s: float, failed: Callable[[], bool] = lambda: False
) -> None:
    """Waits until all ranks have come here, each after its last collective.

    It gives up when `failed()` says that a rank will not come, when the store no longer answers, and after `wait_s`
    seconds in which no rank has come. No collective is called: gloo raises an error on a rank that still receives when
    its peer has closed the connection.
    """
    try:
        wait_for_all(store, "done", ranks, wait_s=wait_s, failed=failed)
        count_reader(store, "left", ranks, holds_store=holds_store and not failed(), wait_s=READ_S)
    except RuntimeError:  # of torch.distributed: the rank that held the store has failed
        return


def wait_for_all(store: Store, key: str, ranks: int, *, wait_s: float, failed: Callable[[], bool]) -> None:
    """Counts this rank at `key`, and waits until all are counted; see leave_together for when it gives up."""
    before, until = store.add(key, 1), time.monotonic() + wait_s
    while before < ranks and time.monotonic() < until and not failed():
        time.sleep(POLL_S)
        count = store.add(key, 0)
        if count > before:
            before, until = count, time.monotonic() + wait_s


def count_reader(store: Store, key: str, readers: int, *, holds_store: bool, wait_s: float) -> None:
    """Counts this process, which has read what it needs and asks the store nothing after.

    The process that holds the store then waits until `readers` are counted at `key`, itself among them, for at most
    `wait_s` seconds.
    """
    read, until = store.add(key, 1), time.monotonic() + wait_s
    while holds_store and read < readers and time.monotonic() < until:
        time.sleep(POLL_S)
        read = store.add(key, 0)


T = TypeVar("T")
GIVEN_UP = "samestep/given up"  # a key of the store: set by a rank that fails
ANSWER_S = 1.5  # seconds in which the other ranks answer that they are alive
# gloo's messages, in a plain RuntimeError, when another rank has exited or no longer answers. Each must name one of
# gloo's source files: a job's own "timeout" must not match.
GLOO_LOST = re.compile(
    r"gloo.*([Cc]onnection (closed|reset|refused|timed out)|[Bb]roken pipe|remote process (exited|has terminated)"
    r"|[Tt]imed out waiting|[Ww]ait timeout|timeout|No route to host)"
)
GLOO_SOURCE = re.compile(r"^\[\S+:\d+\] ")  # the file and line with which gloo's messages begin


def says_lost(error: BaseException) -> bool:
    """Returns whether an exception only reports that another rank is lost, which is never the first cause."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if {"DistError", "LostPeer"} & kinds:  # DistError: of torch.distributed's stores and NCCL
        return True
    return isinstance(error, RuntimeError) and bool(GLOO_LOST.search(str(error)))


@dataclass(frozen=True)
class Member:
    """The entry of a rank for the others: where it runs, and the request of its command."""

    rank: int
    host: str
    local_rank: int
    device: str
    asked: LaunchRequest | None = None


def member_of(text: bytes, rank: int) -> Member:
    """Returns the entry of a rank. Raises UserError for one that no rank writes: the store takes entries from
    anybody."""
    try:
        member = from_json(Member, json.loads(text), f"what rank {rank} says")
    except (ValueError, RecursionError):
        member = None
    if member is None or member.rank != rank:
        raise UserError(f"what rank {rank} says is not as samestep writes it; choose another port for the rendezvous")
    return replace(member, host=printable(member.host, 255), device=printable(member.device, 255))


class Membership:
    """The ranks of one process group: which rank runs where, and which are lost."""

    def __init__(self, store: Store, world: World, request: LaunchRequest | None = None) -> None:
        self._store, self.world = store, world
        self.others: list[Member] = []
        me = Member(world.rank, hostname(), world.local_rank, world.device, request)
        store.set(self._key("here", world.rank), json.dumps(as_json(me)))

    def _key(self, what: str, rank: int) -> str:
        return f"samestep/{what}/{rank}"

    def read(self) -> None:
        """Waits until every rank has come, and reads where it runs and what it was asked.

        Raises Refused when two ranks on one host have the same local rank, or when the command of one differs from
        rank 0's, once every rank knows it.
        """
        ranks = range(self.world.size)
        texts = [self._store.get(self._key("here", rank)) for rank in ranks]
        self.others = [member_of(text, rank) for rank, text in enumerate(texts)]
        try:
            self._check_local_ranks()
            self._check_requests()
        except Refused:
            # The store may end with rank 0.
            holds_store = self.world.rank == 0
            count_reader(self._store, "samestep/read", self.world.size, holds_store=holds_store, wait_s=READ_S)
            raise

    def _check_local_ranks(self) -> None:
        rank_at: dict[tuple[str, int], int] = {}
        for member in self.others:
            place = member.host, member.local_rank
            if place in rank_at:
                raise Refused(
                    message(
                        "two_ranks_with_one_local_rank",
                        ranks=[rank_at[place], member.rank],
                        host=member.host,
                        local_rank=member.local_rank,
                        device=member.device,
                    )
                )
            rank_at[place] = member.rank

    def _check_requests(self) -> None:
        first = self.others[0]
        for member in self.others[1:]:
            kinds = [compared.device.partition(":")[0] for compared in (first, member)]
            different = ("the device", *kinds) if kinds[0] != kinds[1] else None
            if first.asked and member.asked:
                different = different or first.asked.difference(member.asked)
            if different:
                what, on_rank_0, on_rank = different
                raise Refused(
                    message(
                        "commands_of_ranks_differ",
                        rank=member.rank,
                        host=member.host,
                        host_of_rank_0=first.host,
                        what=what,
                        value=on_rank,
                        value_on_rank_0=on_rank_0,
                    )
                )

    def missing(self) -> list[int]:
        """Returns the ranks that have not joined."""
        return [rank for rank in range(self.world.size) if not self._store.check([self._key("here", rank)])]

    def lost(self, error: BaseException) -> LostPeer:
        """Finds the lost ranks after `error`. Asks every other rank for a sign of life, which takes a few seconds."""
        answers = within(ANSWER_S + 1, self._answers)
        detail = GLOO_SOURCE.sub("", str(error).strip().splitlines()[0])[:200]
        report = {"reporter": self.world.rank, "host": self._host(self.world.rank), "error": detail}
        if answers is None:
            return LostPeer(message("store_of_rank_0_does_not_answer", lost_host=self._host(0), **report), [0])
        lost = [rank for rank, answer in answers.items() if answer is None]
        failed = {rank: answer for rank, answer in answers.items() if answer not in (None, "")}
        if failed:
            rank = min(failed)
            why = message("other_rank_failed", rank=rank, rank_host=self._host(rank), why=failed[rank], **report)
            return LostPeer(why, [rank])
        if not lost:
            return LostPeer(message("collective_failed_though_all_ranks_live", error=detail), [])
        # A closed connection on one machine: a launcher reports every other end of a process.
        exited = self.world.local_size == self.world.size and "by peer" in detail
        hosts = [host for host in map(self._host, lost) if host]
        if exited:
            return LostPeer(message("ranks_lost_as_by_exit", ranks=lost, hosts=hosts, **report), lost)
        return LostPeer(message("ranks_lost", ranks=lost, hosts=hosts, **report), lost)

    def failed(self, error: str) -> None:
        """Tells the other ranks that this one has failed with `error`, so that they do not wait for it."""
        within(1.0, lambda: self._store.set(self._key("sign", self.world.rank), error or "an error"))
        self.give_up()

    def give_up(self) -> None:
        """Tells the other ranks that this one will not reach the end."""
        within(1.0, lambda: self._store.set(GIVEN_UP, ""))

    def any_failed(self) -> bool:
        """Returns whether a rank has said that it will not reach the end."""
        return bool(self._store.check([GIVEN_UP]))

    def _answers(self) -> dict[int, str | None]:
        """Returns for each other rank: '' if it is alive, its error if it has failed, None if it does not answer."""
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._store.set(GIVEN_UP, "")
        self._store.set(self._key("sign", self.world.rank), "")
        waiting = [rank for rank in range(self.world.size) if rank != self.world.rank]
        answers: dict[int, str | None] = dict.fromkeys(waiting)
        until = time.monotonic() + ANSWER_S
        while waiting and time.monotonic() < until:
            for rank in [r for r in waiting if self._store.check([self._key("sign", r)])]:
                answers[rank] = self._store.get(self._key("sign", rank)).decode()
                waiting.remove(rank)
            if any(answers.values()):
                break
            time.sleep(0.05)
        return answers

    def _host(self, rank: int) -> str | None:
        """Returns where a rank runs; None where that is not known."""
        return self.others[rank].host if self.others else None


def within(seconds: float, do: Callable[[], T]) -> T | None:
    """Calls `do`. Returns its result, or None when it raises or takes longer than `seconds`."""
    try:
        return in_time(seconds, do)
    except Exception:
        return None


def in_time(seconds: float, do: Callable[[], T]) -> T:
    """Calls `do` in a thread, and returns or raises what it does.

    Raises TimeoutError when it takes longer than `seconds`; the thread then goes on.
    """
    done: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            done.append(do())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return done[0]


def hostname() -> str:
    """Returns this machine's name; in a Slurm job, Slurm's name for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
