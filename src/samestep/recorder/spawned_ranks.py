"""Scripts that start their ranks themselves, by torch.multiprocessing.spawn or multiprocessing.Process.

The ranks are already there: each runs the script up to that call, and then the function as its rank, in this process.
All meet at the launch's rendezvous: a port that the script has chosen is another one in each process. A replay runs the
function as the one rank of a group of one: it is handed 1 where it was handed the number of ranks.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from samestep.errors import TrainingFailed, UserError
from samestep.job.foreign import is_a
from samestep.message import message
from samestep.rank.hooks import Hooks
from samestep.recorder.random_numbers import seed_anew
from samestep.recorder.replay_player import ReplayPlayer
from samestep.world import World

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
SIZE = re.compile("world|nproc|num_proc|gpus|ranks|devices")  # in the name of a setting that is the number of ranks
LIBRARIES = ("torch", "multiprocessing", "samestep")
OPEN_GROUP = "init_process_group"


def patch_spawned_ranks(hooks: Hooks, world: World, player: ReplayPlayer | None, seed: int | None) -> None:
    """Makes spawn() and Process.start() run their function here, as this rank. player: whose replay ends where the
    function knows another number of ranks than 1. seed: of what the script does not seed; None: from the system."""
    ranks = SpawnedRanks(hooks, world, player, seed)
    for name in ("spawn", "start_processes"):
        hooks.attach(torch.multiprocessing, name, ranks.spawn)
    # Processes whose function opens a process group; others start as always.
    hooks.attach(BaseProcess, "start", ranks.start)


class SpawnedRanks:
    """The ranks of one script, of which this process is one."""

    def __init__(self, hooks: Hooks, world: World, player: ReplayPlayer | None, seed: int | None) -> None:
        self._hooks, self._world, self._player, self._seed = hooks, world, player, seed
        self._rendezvous = {name: os.environ.get(name) for name in RENDEZVOUS}
        self._started = 0  # processes that the script has started as its ranks
        self._ranks = 0  # the number of ranks that these processes are told

    def spawn(
        self,
        spawn: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> Joined | None:
        """Runs the function of torch.multiprocessing.spawn() here."""
        if self._player:
            args = with_one_rank(args, nprocs)
        elif nprocs != self._world.size:
            raise UserError(f"the script starts {nprocs} ranks itself; give samestep check --nproc {nprocs}")
        self._run(functools.partial(spawn.run, fn, self._world.rank, *args), fn, nprocs)
        return None if join else Joined()

    def start(self, start: Any, process: Any) -> None:
        """Runs the function of a Process here, where it is a rank's."""
        function = process._target or type(process).run
        if torch.distributed.is_initialized() or not opens_group(function):
            start(process)
            return
        rank, self._started = self._started, self._started + 1
        process._popen = Ended(self._check_number)
        numbers = _numbers([process._args, process._kwargs])
        ranks = self._player.ranks if self._player else self._world.size
        self._ranks = ranks if ranks in numbers else 0
        if self._player:
            process._args, process._kwargs = with_one_rank((process._args, process._kwargs), ranks)
        if rank == self._world.rank:
            self._run(functools.partial(start.run, process.run), function, ranks)

    def _check_number(self) -> None:
        """Raises where the script waits for other ranks than this launch has."""
        if self._player or self._started == self._world.size:
            return
        if self._ranks == self._world.size:
            why = message("script_starts_fewer_ranks", started=self._started, ranks=self._ranks)
            raise TrainingFailed(why)
        number = self._started
        raise UserError(f"the script starts {number} ranks itself; give samestep check --nproc {number}")

    def _run(self, call: Callable[[], Any], function: Any, ranks: int) -> None:
        if self._player and (name := _global_number(function, ranks, set())):
            self._player.stop(message("function_reads_ranks", name=name))
        if self._player:
            os.environ["WORLD_SIZE"] = "1"  # variables that the script may have set for the processes that it starts
        self._patch_group()
        seed_anew(self._seed)  # a spawned process does not inherit the random state
        call()

    def _patch_group(self) -> None:
        """Makes the group meet where the launch says, with the ranks of the launch."""

        def new_rendezvous(rendezvous: Any, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
            ranks = int(os.environ.get("WORLD_SIZE", 1)) if world_size == -1 else world_size
            if self._player and ranks != 1:
                self._player.stop(message("group_of_other_ranks", ranks=ranks))
            for name, value in self._rendezvous.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            return rendezvous("env://", rank, world_size, **kwargs)

        self._hooks.attach(sys.modules["torch.distributed.distributed_c10d"], "rendezvous", new_rendezvous)


class Joined:
    """Stands for the result of spawn(join=False), after its function has ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


class Ended:
    """Stands for the process of a Process that starts none. waited: called when the script waits for it."""

    returncode, sentinel, pid = 0, -1, 0

    def __init__(self, waited: Callable[[], None]) -> None:
        self._waited = waited

    def poll(self, flag: int = 0) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        self._waited()
        return 0

    def terminate(self) -> None:
        pass

    kill = close = terminate


def with_one_rank(values: Any, ranks: int) -> Any:
    """Returns arguments with 1 for the number of ranks: the first plain number that is it, and settings named so."""
    changed, _ = _with_one(values, ranks, "", False)
    return changed


def _with_one(value: Any, ranks: int, name: str, done: bool) -> tuple[Any, bool]:
    """Returns (the value, whether a plain number was put in). done: whether one was before."""
    if type(value) is int:
        is_setting = bool(name) and bool(SIZE.search(name.lower()))
        is_first = not name and not done
        return (1, done or not name) if value == ranks and (is_setting or is_first) else (value, done)
    if is_a(value, tuple | list) and type(value) in (tuple, list):
        parts = []
        for part in value:
            part, done = _with_one(part, ranks, "", done)
            parts.append(part)
        return type(value)(parts), done
    if type(value) is dict:
        return {key: _with_one(part, ranks, str(key), True)[0] for key, part in value.items()}, done
    if is_a(value, Namespace | SimpleNamespace) or hasattr(type(value), "__dataclass_fields__"):
        changed = copy.copy(value)
        for key, part in vars(value).items():
            object.__setattr__(changed, key, _with_one(part, ranks, key, True)[0])
        return changed, done
    return value, done


def _numbers(value: Any) -> list[int]:
    """Returns the plain numbers in arguments."""
    if type(value) is int:
        return [value]
    if is_a(value, tuple | list):
        return [number for part in value for number in _numbers(part)]
    parts = value if is_a(value, dict) else vars(value) if is_a(value, Namespace) else {}
    return [number for part in parts.values() for number in _numbers(part)]


def opens_group(function: Any) -> bool:
    """Returns whether a function, or one that it calls, opens a process group."""
    return any(OPEN_GROUP in _names(code) for code, _ in _codes(function, set()))


def _global_number(function: Any, number: int, visited: set[Any]) -> str:
    """Returns the global name by which a function, or one that it calls, reads a number; '' if none."""
    for code, names in _codes(function, visited):
        for name in _names(code):
            value = names.get(name)
            if type(value) is int and value == number:
                return name
    return ""


def _codes(function: Any, visited: set[Any]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yields (code, global names) of a function, and of those that it calls by a global name; not a library's."""
    while is_a(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or code in visited or str(function.__module__).partition(".")[0] in LIBRARIES:
        return
    visited.add(code)
    yield code, names
    for name in _names(code):
        yield from _codes(names.get(name), visited)


def _names(code: CodeType) -> list[str]:
    """Returns the global names that a function's code reads, with those of the functions inside of it."""
    inside = [name for value in code.co_consts if is_a(value, CodeType) for name in _names(value)]
    return [*code.co_names, *inside]
