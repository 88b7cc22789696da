"""Runs a user's script in this rank's process, as `python script.py` would, with the recorder attached.

A script may start its ranks itself, with torch.multiprocessing.spawn: they are already there. Each rank of the launch
runs the script up to that call, and then the function that spawn() would have run as this rank. A replay runs that
function as the one rank of a group of one: it is handed 1 where it was handed the number of ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.distributed
import torch.multiprocessing

from samestep.errors import UserError
from samestep.message import message
from samestep.rank import flight_recorder
from samestep.recorder.evaluations import ENTRIES
from samestep.recorder.random_numbers import seed_anew
from samestep.recorder.recorder import Recorder
from samestep.recorder.replay_player import ReplayPlayer
from samestep.recorder.replay_saver import ReplaySaver
from samestep.records.files import naming_full_disks, write
from samestep.records.record import RankRecord
from samestep.records.script import PLAN, REPLAYED, ReplayRecord, ScriptPlan, ScriptRecord
from samestep.world import World
from samestep.world.become_worker import SCRIPT
from samestep.world.processes import end_children

AGENTS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # with these, rank 0 would open no store
LEAVE_S, LEAVE_STEPS = 10.0, 5  # how long a rank waits for the others' last step: seconds, or so many of its steps


def run_script(plan: ScriptPlan, record: RankRecord) -> NoReturn:
    """Runs the script until it ends by itself, writes the record of its steps, and ends this process.

    After the last step that was asked the process ends, inside that step: no line of the script runs after it.
    """
    folder = Path(plan.out)
    flight_recorder.enable(ENTRIES)
    plan = _completed(plan, record.world)
    played: ReplayPlayer | None = None
    saver: ReplaySaver | None = None

    def enough(script_record: ScriptRecord) -> NoReturn:
        with naming_full_disks():
            if saver:
                saver.write()
            if played:
                write(folder / REPLAYED, played.result())
        leave(script_record)

    def leave(script_record: ScriptRecord) -> NoReturn:
        with naming_full_disks():
            (folder / f".room-rank{script_record.rank}").unlink(missing_ok=True)  # which the worker keeps free
            write(folder / f"rank{script_record.rank}.json", script_record)
        _wait_for_others(folder, script_record)
        end_children()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    recorder = Recorder(plan, record.world, enough)
    if plan.keep:
        saver = ReplaySaver(recorder, folder, record.world)
        saver.attach()
    if plan.replay:

        def stop(result: ReplayRecord) -> NoReturn:
            write(folder / REPLAYED, result)
            leave(recorder.record("itself"))

        os.chdir(plan.replay.work)
        played = ReplayPlayer(recorder, plan.replay, stop)
        played.attach()
    recorder.attach()
    patch_spawn(record.world, played)
    seed_anew()  # a forked rank has the random state of all others
    try:
        _run(plan)
    except SystemExit as left:
        if left.code not in (None, 0):
            raise RuntimeError(f"{plan.script} ended itself with sys.exit({left.code!r})") from None
    if saver:
        saver.write()
    if played:
        write(folder / REPLAYED, played.result())
    leave(recorder.record("itself"))


def _run(plan: ScriptPlan) -> None:
    """Runs a script, or a module of the working directory, as __main__."""
    sys.argv = [plan.script, *plan.arguments]
    if not plan.module:
        sys.path.insert(0, str(Path(plan.script).resolve().parent))
        runpy.run_path(str(Path(plan.script).absolute()), run_name="__main__")  # __file__ is absolute, as of python
        return
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(plan.script)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise UserError(f"there is no module {plan.script}; run the command in the folder that holds its package")
    runpy.run_module(plan.script, run_name="__main__", alter_sys=True)


def _completed(plan: ScriptPlan, world: World) -> ScriptPlan:
    """Takes the script from the environment where a command has started this rank. Rank 0 writes it into the plan."""
    if SCRIPT not in os.environ:
        return plan
    if world.size != plan.ranks:
        raise UserError(f"the command starts {world.size} ranks; give samestep check --nproc {world.size}")
    words = json.loads(os.environ[SCRIPT])
    module = words[0] == "-m"
    script, *arguments = words[module:]
    plan = replace(plan, script=script, arguments=tuple(arguments), module=module)
    if world.rank == 0:
        write(Path(plan.out) / PLAN, plan)
    return plan


def _wait_for_others(folder: Path, script_record: ScriptRecord) -> None:
    """Waits until the other ranks have their records, too: their last step may need what this process still sends."""
    until = time.monotonic() + max(LEAVE_S, LEAVE_STEPS * max(script_record.step_s, default=0.0))
    while time.monotonic() < until:
        ended = {*folder.glob("rank[0-9]*.json"), *folder.glob("error-rank[0-9]*.json")}
        if len(ended) >= script_record.size:
            return
        time.sleep(0.01)


class Joined:
    """What spawn(join=False) returns, after its function has ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def patch_spawn(world: World, player: ReplayPlayer | None) -> None:
    """Makes spawn() run its function here, as this rank. player: whose replay ends where it starts another number."""
    spawn = torch.multiprocessing.spawn  # type: ignore[attr-defined]

    @functools.wraps(spawn)
    def new_spawn(
        fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **_unused: Any
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
        player.stop(message("function_reads_ranks", name=name))
    open_group = torch.distributed.init_process_group

    @functools.wraps(open_group)
    def new_open_group(*given: Any, **named: Any) -> None:
        size = named.get("world_size", given[3] if len(given) > 3 else -1)
        if size not in (-1, 1):
            player.stop(message("group_of_other_ranks", ranks=size))
        open_group(*given, **named)

    torch.distributed.init_process_group = new_open_group
    first = next((place for place, value in enumerate(args) if type(value) is int and value == ranks), len(args))
    return tuple(1 if place == first else value for place, value in enumerate(args))


def _global_number(fn: Any, number: int, visited: set[Any]) -> str:
    """Returns the global name by which a function, or one of its module that it calls, reads a number; '' if none."""
    code, names = getattr(fn, "__code__", None), getattr(fn, "__globals__", {})
    if code is None or code in visited:
        return ""
    visited.add(code)
    for name in _names(code):
        value = names.get(name)
        if type(value) is int and value == number:
            return str(name)
        if getattr(value, "__module__", "") == fn.__module__ and (found := _global_number(value, number, visited)):
            return found
    return ""


def _names(code: CodeType) -> list[str]:
    """Returns the global names that a function's code reads, with those of the functions inside of it."""
    inside = [name for value in code.co_consts if isinstance(value, CodeType) for name in _names(value)]
    return [*code.co_names, *inside]
