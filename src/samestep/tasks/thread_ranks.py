"""Ranks as threads of one process, with the process group that torch's own tests use for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

THREAD = "samestep rank "  # and the rank: a thread's name


def call(size: int, function: Callable[[], object]) -> dict[int, pytest.CallInfo[None] | None]:
    """Calls a function in `size` threads, each a rank of a group.

    Returns for each rank how the call ended; None for one that was stopped in a collective because another rank failed.
    """
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    calls: dict[int, pytest.CallInfo[None] | None] = {}
    store = dist.HashStore()
    failed = threading.Event()

    def rank_main(rank: int) -> None:
        def opened() -> None:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            function()

        ended = pytest.CallInfo.from_call(opened, when="call")
        stopped = ended.excinfo is not None and isinstance(ended.excinfo.value, SystemExit) and failed.is_set()
        calls[rank] = None if stopped else ended
        if ended.excinfo is not None and not stopped:
            failed.set()
            ProcessLocalGroup.exception_handle(ended.excinfo.value)  # wakes those that wait for this rank
        if dist.is_initialized():
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=rank_main, args=(rank,), name=f"{THREAD}{rank}") for rank in range(size)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return dict(sorted(calls.items()))
