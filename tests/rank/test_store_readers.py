"""The process that holds a store waits for those that read from it, and no longer than it should."""

from __future__ import annotations

import threading

from torch.distributed import HashStore

from budget import budget
from samestep.rank.store_readers import count_reader


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
