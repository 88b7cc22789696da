"""A graceful stop: a signal to one rank ends all ranks after the same step.

It needs no collective: the ranks agree through the rendezvous store. In each rank a thread polls the store twice a
second, so that a dead connection cannot block the training. When every rank has acknowledged the request, rank 0 sets
the last step to one that no rank can have passed: a rank is at most one step ahead of rank 0, because each step needs
all gradients, and libraries draw one batch ahead.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from samestep.world import World

POLL_S = 0.5
AHEAD = 4  # steps between rank 0's current one and the last


class AgreedStep:
    """A step that all ranks agree on when one of them requests it.

    store: the rendezvous store; None for a single process.
    """

    def __init__(self, world: World, store: Store | None) -> None:
        self.world, self._store = world, store
        self._requested = self._acknowledged = False
        if store is not None:
            threading.Thread(target=self._poll, args=(store,), daemon=True).start()

    def request(self) -> None:
        """Requests a step."""
        self._requested = True

    def close(self) -> None:
        """Ends the thread. Nothing can be requested any more."""
        self._acknowledged = True

    def _poll(self, store: Store) -> None:
        try:
            while not self._acknowledged:
                if self._requested:
                    store.set("requested", "")
                if store.check(["requested"]):
                    store.add("acknowledged", 1)
                    self._acknowledged = True
                time.sleep(POLL_S)
        except RuntimeError:
            return  # the store is closed or lost; then the training's collectives fail, and say so

    def agreed(self, step: int, alone: int) -> int | None:
        """Returns the step, once there is one: none that a rank has passed. Call it before each step's first batch.

        alone: what it is where there is no store.
        """
        if self._store is None:
            return alone if self._requested else None
        if self._acknowledged:
            if self.world.rank == 0 and self._store.add("acknowledged", 0) == self.world.size:
                self._store.set("last", str(step + AHEAD))
            if self._store.check(["last"]):
                return int(self._store.get("last"))
        return None


class Stop(Protocol):
    """Ends a training early."""

    last: int | None

    def after(self, done: int) -> None: ...

    def ends_before(self, step: int) -> bool: ...


class NoStop:
    """Lets a training run to its end."""

    last: int | None = None

    def after(self, done: int) -> None:
        """Does nothing."""

    def ends_before(self, step: int) -> bool:
        return False


class GracefulStop(AgreedStep):
    """Ends a training after the same step on every rank when one of them gets SIGUSR2 or SIGXCPU."""

    def __init__(self, world: World, store: Store | None) -> None:
        self.last: int | None = None  # the step after which all ranks end; None: not agreed yet
        super().__init__(world, store)
        for name in ("SIGUSR2", "SIGXCPU"):  # the command's request; a limit of CPU time, which each process has
            if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
                signal.signal(getattr(signal, name), self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        self.request()

    def after(self, done: int) -> None:
        """Ends the training one step after the first `done` steps. Every rank must call it with the same number.

        One step more, because libraries have drawn that step's first batch already.
        """
        self.last = done

    def ends_before(self, step: int) -> bool:
        """Returns whether the training ends before `step`. Call it before each batch."""
        if self.last is None:
            self.last = self.agreed(step, alone=step - 1)
        return self.last is not None and step > self.last
