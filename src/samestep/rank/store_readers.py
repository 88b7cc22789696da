"""Keeps a store open until all processes that read from it have done so: it ends with the process that holds it."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

POLL_S = 0.02


def count_reader(store: Store, key: str, readers: int, *, holds_store: bool, wait_s: float) -> None:
    """Counts this process, which has read what it needs and asks the store nothing after.

    The process that holds the store then waits until `readers` are counted at `key`, itself among them, for at most
    `wait_s` seconds.
    """
    read, until = store.add(key, 1), time.monotonic() + wait_s
    while holds_store and read < readers and time.monotonic() < until:
        time.sleep(POLL_S)
        read = store.add(key, 0)
