"""Ranks leave together, the one that holds the store last; and none waits longer than it should."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, Store

from budget import budget
from samestep.rank.membership import Membership, count_reader, leave_together
from samestep.world import World


def test_the_holder_waits_for_the_last_reader() -> None:
    store, waits = HashStore(), {"holds_store": True, "wait_s": budget()}
    holder = threading.Thread(target=count_reader, args=(store, "read", 3), kwargs=waits, daemon=True)
    holder.start()
    count_reader(store, "read", 3, holds_store=False, wait_s=budget())  # returns at once
    holder.join(0.2)
    assert holder.is_alive()
    count_reader(store, "read", 3, holds_store=False, wait_s=budget())
    holder.join(budget())
    assert not holder.is_alive()


def test_the_holder_does_not_wait_for_one_that_is_lost() -> None:
    store = HashStore()
    count_reader(store, "read", 2, holds_store=True, wait_s=0.05)
    assert store.add("read", 0) == 1


def leaving(store: Store, rank: int, ranks: int, **how: Any) -> threading.Thread:
    """A rank that leaves, in a thread of its own."""
    asked = {"holds_store": rank == 0, "wait_s": budget(), **how}
    thread = threading.Thread(target=leave_together, args=(store, ranks), kwargs=asked, daemon=True)
    thread.start()
    return thread


def test_no_rank_leaves_before_the_last_has_come() -> None:
    store = HashStore()
    first = [leaving(store, rank, 3) for rank in (0, 1)]
    first[1].join(0.2)
    assert [thread.is_alive() for thread in first] == [True, True]
    last = leaving(store, 2, 3)
    for thread in (*first, last):
        thread.join(budget())
        assert not thread.is_alive()
    assert store.add("left", 0) == 3


@pytest.mark.check
def test_a_rank_that_fails_is_not_waited_for() -> None:
    """Nor one that does not come, nor a store that has ended with the rank that held it."""
    members = [Membership(HashStore(), World(rank, 2, rank, 2)) for rank in (0, 1)]
    assert not members[0].any_failed()
    members[0].failed("RuntimeError: planted")
    waits = leaving(HashStore(), 0, 2, failed=members[0].any_failed)
    waits.join(budget())
    assert not waits.is_alive()
    alone = leaving(HashStore(), 0, 2, wait_s=0.05, failed=members[1].any_failed)
    alone.join(budget())
    assert not alone.is_alive()

    class Ended(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise DistNetworkError("the connection is closed")

    leave_together(Ended(), 2, holds_store=False, wait_s=budget())


def test_a_slow_rank_is_waited_for_while_others_still_come() -> None:
    store = HashStore()
    first = leaving(store, 1, 4, wait_s=0.4)
    for _ in range(2):
        first.join(0.25)
        assert first.is_alive()
        store.add("done", 1)
    first.join(0.25)
    assert first.is_alive()
    store.add("done", 1)
    first.join(budget())
    assert not first.is_alive()
