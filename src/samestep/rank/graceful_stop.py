"""A graceful stop: one rank is asked by a signal, all ranks end after the same step.

No collective: they agree in the store where they met. A thread of each rank looks there twice a second, so that a
dead connection cannot hold the training up. When all have heard of the wish, rank 0 names a step that none can have
passed: a rank is at most one step ahead of rank 0, because each step needs all gradients, and libraries draw one
batch ahead.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from torch._C._distributed_c10d import Store

from samestep.world import World

LOOK_S = 0.5
AHEAD = 4  # steps from rank 0's present one to the last


class GracefulStop:
    """Ends a training after the same step on every rank, when one is asked to by a signal.

    store: the process group's; None for a process that is alone.
    """

    def __init__(self, world: World, store: Store | None) -> None:
        self.world, self._store = world, store
        self.last: int | None = None  # the step after which all ranks end, once it is known
        self._asked = self._heard = False
        if hasattr(signal, "SIGUSR2"):
            signal.signal(signal.SIGUSR2, self._ask)
        if store is not None:
            threading.Thread(target=self._listen, args=(store,), daemon=True).start()

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def _listen(self, store: Store) -> None:
        try:
            while not self._heard:
                if self._asked:
                    store.set("asked", "")
                if store.check(["asked"]):
                    store.add("heard", 1)
                    self._heard = True
                time.sleep(LOOK_S)
        except RuntimeError:
            return  # the meeting is over, or lost, which the training's own collectives tell

    def after(self, done: int) -> None:
        """Ends the training, for a reason that all ranks know, one step after the `done` there are: libraries have
        drawn that step's first batch already, and every engine is to end at the same step."""
        self.last = done

    def ends_before(self, step: int) -> bool:
        """Whether no batch of `step` may be trained on. Call it before each batch."""
        if self.last is None:
            self._agree(step)
        return self.last is not None and step > self.last

    def _agree(self, step: int) -> None:
        if self._store is None:
            self.last = step - 1 if self._asked else None
        elif self._heard:
            if self.world.rank == 0 and self._store.add("heard", 0) == self.world.size:
                self._store.set("last", str(step + AHEAD))
            if self._store.check(["last"]):
                self.last = int(self._store.get("last"))
