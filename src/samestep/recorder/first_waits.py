"""Where this process waits for others before any training begins: a rank, a launcher's process, or one with a store.

It writes that into a file before it waits, and removes the file after it. Nobody is asked, and nothing is awaited.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from samestep.rank.hooks import Hooks
from samestep.recorder.leaving import calling_place, said_place
from samestep.records.rank_ends import WAIT, Wait
from samestep.world.regular_files import remove_file

LAUNCHER, AGENT = "torch.distributed.launcher.api", "torch.distributed.elastic.agent.server.api"
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
IN_STORE = ("get", "multi_get", "wait")


class FirstWaits:
    """The waits of this process, one at a time: what a wait calls waits for the same. folder: for their file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wait: Wait | None = None
        self._machines: Wait | None = None  # of torchrun, where this process is one
        self._pid = 0  # of the process that has opened its group: its waits are no first ones

    @property
    def is_launcher(self) -> bool:
        """Whether this process is torchrun, or has called it."""
        return self._machines is not None

    def patch(self, hooks: Hooks) -> None:
        """Notes the waits of stores, and of torchrun once it is imported."""
        hooks.attach(TCPStore, "__init__", self._new_store_call(TCPStore.__name__))
        for name in IN_STORE:
            hooks.attach(Store, name, self._new_store_call(f"Store.{name}"))
        hooks.after_import(LAUNCHER, lambda: hooks.attach(sys.modules[LAUNCHER], "launch_agent", self._new_launch))
        hooks.attach_after_import(AGENT, "SimpleElasticAgent", "_rendezvous", self._new_rendezvous)
        hooks.attach_after_import(RENDEZVOUS, "_BackendRendezvousStateHolder", "sync", self._new_sync)

    @contextmanager
    def of_group(self, rank: int, size: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        """Notes that a rank waits in init_process_group. One that raises there leaves its file."""
        local_rank, local_size, launched = map(_number, ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        local = list(range(rank - local_rank, rank - local_rank + local_size))
        self._begin(
            Wait(
                "rank",
                os.getpid(),
                time.time(),
                "init_process_group",
                line=_line(),
                number=rank,
                size=size,
                local=local,
                launched=launched if local else 0,
                endpoint=_endpoint(arguments, options),
            )
        )
        yield
        self._end()
        self._pid = os.getpid()

    def _new_store_call(self, where: str) -> Any:
        def new_call(call: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
            is_later = self._wait or self.is_launcher or os.getpid() == self._pid
            if is_later or threading.current_thread() is not threading.main_thread():
                return call(store, *args, **kwargs)
            key = f"({args[0]!r:.60})" if args and where != TCPStore.__name__ else ""
            port = f"{args[0]}:{args[1]}" if len(args) > 1 and not key else None
            self._begin(Wait("store", os.getpid(), time.time(), f"{where}{key}", line=_line(), endpoint=port))
            try:
                return call(store, *args, **kwargs)
            finally:
                self._end()

        return new_call

    def _new_launch(self, launch: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        number = getattr(config, "rdzv_configs", {}).get("rank", 0)
        endpoint, size = config.rdzv_endpoint or None, config.min_nodes
        static = [os.uname().nodename] if config.rdzv_backend == "static" and size == 2 else []
        self._machines = Wait(
            "machine", os.getpid(), time.time(), "torchrun", number=number, size=size, endpoint=endpoint, hosts=static
        )
        self._begin(self._machines)
        return launch(config, *args, **kwargs)

    def _new_rendezvous(self, rendezvous: Any, agent: Any, *args: Any, **kwargs: Any) -> Any:
        if self._machines and not self._wait:  # after a restart
            self._begin(replace(self._machines, since=time.time()))
        result = rendezvous(agent, *args, **kwargs)
        self._end()
        return result

    def _new_sync(self, sync: Any, holder: Any, *args: Any, **kwargs: Any) -> Any:
        result = sync(holder, *args, **kwargs)
        if self._wait and self._wait.kind == "machine":
            hosts = sorted(str(node.addr) for node in holder.state.participants)
            if hosts != self._wait.hosts:
                self._begin(replace(self._wait, hosts=hosts))
        return result

    def _begin(self, wait: Wait) -> None:
        from samestep.records.files import write  # here: most processes that import torch wait for nobody

        self._wait = wait
        with suppress(Exception):  # a full disk
            write(self._folder / WAIT.format(wait.pid), wait)

    def _end(self) -> None:
        self._wait = None
        with suppress(OSError):
            remove_file(self._folder / WAIT.format(os.getpid()))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0


def _line() -> str | None:
    place = calling_place()
    return said_place(place) if place else None


def _endpoint(arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """Returns where the ranks of a process group meet, by the arguments of init_process_group."""
    store, method = options.get("store"), options.get("init_method", arguments[1] if len(arguments) > 1 else None)
    if store is not None:
        host, port = getattr(store, "host", None), getattr(store, "port", None)
        return f"{host}:{port}" if host and port else None
    if method and not method.startswith("env:"):
        return str(method).removeprefix("tcp://")
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else None
