"""Scripts that start their ranks themselves, with torch.multiprocessing.spawn: the ranks are already there.

Each rank of the launch runs the script up to that call, and then the function that spawn() would have run as this rank.
A replay runs that function as the one rank of a group of one: it is handed 1 where it was handed the number of ranks.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from samestep.errors import UserError
from samestep.recorder.replay_player import ReplayPlayer
from samestep.world import World

GIVES = "the script gives init_process_group {} ranks otherwise than by the arguments of spawn"
READS = "the script's function reads {}, which is the number of its ranks, otherwise than from the arguments of spawn"
AGENTS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # with these, rank 0 would open no store


class Joined:
    """What spawn(join=False) returns, after its function has ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def patch_spawn(world: World, player: ReplayPlayer | None) -> None:
    """Makes spawn() run its function here, as this rank. player: whose replay ends where it starts another number."""
    spawn = torch.multiprocessing.spawn  # type: ignore[attr-defined]

    @functools.wraps(spawn)
    def new_spawn(
        fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> Joined | None:
        if player:
            args = _of_one(fn, args, nprocs, player)
        elif nprocs != world.size:
            raise UserError(f"the script starts {nprocs} ranks itself; give samestep check --nproc {nprocs}")
        for name in AGENTS:
            os.environ.pop(name, None)
        seed_anew()  # a spawned process does not inherit the random state
        fn(world.rank, *args)
        return None if join else Joined()

    torch.multiprocessing.spawn = new_spawn  # type: ignore[attr-defined]


def _of_one(fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, player: ReplayPlayer) -> tuple[Any, ...]:
    """Returns the arguments of spawn's function with 1 for the number of ranks, which is their first such number.

    Ends the replay where the function knows that number otherwise: it would divide by ranks that are not there.
    """
    if name := _global_number(fn, ranks, set()):
        player.stop(READS.format(name))
    open_group = torch.distributed.init_process_group

    @functools.wraps(open_group)
    def new_open_group(*given: Any, **named: Any) -> None:
        size = named.get("world_size", given[3] if len(given) > 3 else -1)
        if size not in (-1, 1):
            player.stop(GIVES.format(size))
        open_group(*given, **named)

    torch.distributed.init_process_group = new_open_group
    first = next((i for i, each in enumerate(args) if type(each) is int and each == ranks), len(args))
    return tuple(1 if i == first else each for i, each in enumerate(args))


def _global_number(fn: Any, number: int, seen: set[Any]) -> str:
    """Returns the global name by which a function, or one of its module that it calls, reads a number; '' if none."""
    code, names = getattr(fn, "__code__", None), getattr(fn, "__globals__", {})
    if code is None or code in seen:
        return ""
    seen.add(code)
    for name in _names(code):
        value = names.get(name)
        if type(value) is int and value == number:
            return str(name)
        if getattr(value, "__module__", "") == fn.__module__ and (global_name := _global_number(value, number, seen)):
            return global_name
    return ""


def _names(code: CodeType) -> list[str]:
    """Returns the global names that a function's code reads, with those of the functions inside of it."""
    inside = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return [*code.co_names, *inside]


def seed_anew() -> None:
    """Seeds this process's random numbers as those of a new process are: from the system."""
    random.seed()
    torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
