"""Which rank runs where, written in the store of the process group, so that a lost rank can be named."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from samestep.errors import LostPeer, Refused
from samestep.world import World

T = TypeVar("T")
ANSWER_S = 1.5  # how long the others have to tell that they are still there
# What gloo says, in an exception without a kind of its own, when another rank has left or answers no more. Only from
# its own sources: a job's "timeout" is the job's.
LOST = re.compile(
    r"gloo.*([Cc]onnection (closed|reset|refused|timed out)|[Bb]roken pipe|remote process (exited|has terminated)"
    r"|[Tt]imed out waiting|[Ww]ait timeout|timeout|No route to host)"
)
PLACE = re.compile(r"^\[\S+:\d+\] ")  # where in gloo's source an error arose


def says_lost(error: BaseException) -> bool:
    """Whether an exception tells that another rank has left or answers no more, which is never the first cause."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if {"DistError", "LostPeer"} & kinds:  # DistError: of torch.distributed's stores and NCCL
        return True
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


class Membership:
    """The ranks of one group."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self.world = store, world
        self.others: list[dict[str, Any]] = []
        place = {"rank": world.rank, "host": hostname(), "local_rank": world.local_rank, "device": world.device}
        store.set(self._key("here", world.rank), json.dumps(place))

    def _key(self, what: str, rank: int) -> str:
        return f"samestep/{what}/{rank}"

    def read(self) -> None:
        """Reads where all ranks are; call it when they have met. Raises Refused when two share one local rank."""
        ranks = range(self.world.size)
        self.others = [json.loads(self._store.get(self._key("here", rank))) for rank in ranks]
        seen: dict[tuple[str, int], int] = {}
        for other in self.others:
            place = (other["host"], other["local_rank"])
            if place in seen:
                raise Refused(
                    f"ranks {seen[place]} and {other['rank']} on {place[0]} both have local rank {place[1]}, so both "
                    f"would use one device ({other['device']}); unset LOCAL_RANK, or let one launcher number them, as "
                    "in torchrun --nproc-per-node or srun --ntasks-per-node"
                )
            seen[place] = other["rank"]

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.world.size) if not self._store.check([self._key("here", rank)])]

    def lost(self, error: BaseException) -> LostPeer:
        """Who is gone, now that `error` says that somebody is. Asks every other rank; takes a few seconds."""
        answers = within(ANSWER_S + 1, self._answers)
        said = PLACE.sub("", str(error).strip().splitlines()[0])[:200]
        if answers is None:
            host = self.others[0]["host"] if self.others else "unknown"
            lost, how = (
                [0],
                f"rank 0 on {host} is lost, or the way to it: the place where the ranks meet gives no answer",
            )
        else:
            lost = [rank for rank, answer in answers.items() if answer is None]
            failed = {rank: answer for rank, answer in answers.items() if answer not in (None, "")}
            if failed:
                rank = min(failed)
                lost, how = [rank], f"{self._name(rank)} failed: {failed[rank]}"
            elif lost:
                how = f"{', '.join(map(self._name, lost))} {'is' if len(lost) == 1 else 'are'} lost: no sign of life"
            else:
                return LostPeer(f"a collective failed, though every rank is there: {said}", [])
        return LostPeer(f"{how} (seen by {self._name(self.world.rank)}: {said})", lost)

    def failed(self, message: str) -> None:
        """Tells the others that this rank fails by itself, so that they need not wait for it."""
        within(1.0, lambda: self._store.set(self._key("sign", self.world.rank), message or "an error"))

    def _answers(self) -> dict[int, str | None]:
        """By rank: '' if it is there, its own error if it has failed, None if it gives no sign."""
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
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

    def _name(self, rank: int) -> str:
        return f"rank {rank}" + (f" on {self.others[rank]['host']}" if self.others else "")


def within(seconds: float, do: Callable[[], T]) -> T | None:
    """What `do` returns; None when it fails, or hangs on a dead connection for so long."""
    try:
        return in_time(seconds, do)
    except Exception:
        return None


def in_time(seconds: float, do: Callable[[], T]) -> T:
    """What `do` returns or raises. Raises TimeoutError when it takes longer; then it goes on in a thread."""
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
    """This machine's name; Slurm's own for it inside a job."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def names(ranks: Sequence[int]) -> str:
    """'rank 3', or 'ranks 1, 2'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
