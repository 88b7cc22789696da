"""Ends ranks together: none closes its connections while another still reads from them, and the store ends last."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

POLL_S = 0.02
READ_S = 10.0  # how long the process that holds the store waits for those that still read from it


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
