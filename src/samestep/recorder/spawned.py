"""Scripts that start their ranks themselves, with torch.multiprocessing.spawn: the ranks are already there.

Each rank of the launch runs the script up to that call, and then the function that spawn() would have run as this rank.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from samestep.errors import UserError
from samestep.recorder.player import Player
from samestep.world import World

AGENTS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # with these, rank 0 would open no store


class Joined:
    """What spawn(join=False) returns, after its function has ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def patch_spawn(world: World, player: Player | None) -> None:
    """Makes spawn() run its function here, as this rank. player: whose replay ends where it starts another number."""
    spawn = torch.multiprocessing.spawn  # type: ignore[attr-defined]

    @functools.wraps(spawn)
    def new_spawn(
        fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> Joined | None:
        if nprocs != world.size:
            if player:
                player.stop(f"the script starts {nprocs} ranks itself")
            raise UserError(f"the script starts {nprocs} ranks itself; give samestep check --nproc {nprocs}")
        for name in AGENTS:
            os.environ.pop(name, None)
        seed_anew()  # a spawned process does not inherit the random state
        fn(world.rank, *args)
        return None if join else Joined()

    torch.multiprocessing.spawn = new_spawn  # type: ignore[attr-defined]


def seed_anew() -> None:
    """Seeds this process's random numbers as those of a new process are: from the system."""
    random.seed()
    torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
