"""A fork server for the ranks of tests: it imports torch once, and forks every rank that a test asks for.

Starting a rank costs seconds and proving a small job a fraction of one. So tests that prove hundreds of jobs keep
their ranks, and tests that plant a fault, whose ranks must be new, fork them from a process that has torch already.
samestep itself is imported after a first fork, from the folder that the test names; all ranks that import it from
there are forked from that process.

A rank reads the kind and the path of a plan from each line of its pipe, runs it, and writes its record.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",  # torch's optimizers import it when the first is made
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "psutil",
    "pydantic",
)

KEPT_SOURCES = 2  # of samestep itself, and of a copy with a planted fault


def fork_ranks(libraries: list[str]) -> None:
    """Forks one rank for each line of stdin, and answers with its pid. It ends, and its ranks with it, when stdin does.

    libraries: what else it imports; it may change torch for the whole process, which then serves no other.
    A line is JSON: 'environment' of the rank, 'path' to import from, 'plans' and 'log' (its pipe and its output).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print while it is imported
    gc.disable()  # what is imported stays: collections meanwhile take a tenth of the time
    for name in (*PRELOADED, *libraries):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep"]:
        del sys.modules[name]  # torch has loaded the rendezvous of the installed samestep
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that have ended leave no zombies
    sources: dict[str, IO[str]] = {}  # the path to import from -> the pipe of the process that has
    while line := sys.stdin.readline():
        path = json.loads(line)["path"]
        pipe = sources.pop(str(path), None) or _with_samestep(path, answers, sources.values())
        sources[str(path)] = pipe  # the last one: that which was used latest
        for oldest in [*sources][:-KEPT_SOURCES]:
            sources.pop(oldest).close()
        pipe.write(line)
        pipe.flush()


def _with_samestep(path: list[str], answers: IO[str], others: Iterable[IO[str]]) -> IO[str]:
    """Forks a process that imports samestep from `path`, and then forks a rank for each line that is written to the
    returned pipe; where the import fails, it answers 0 to each. It ends when the pipe is closed and its ranks have
    ended. others: the pipes of such processes."""
    reads, writes = os.pipe()
    if os.fork():
        os.close(reads)
        return os.fdopen(writes, "w")
    for pipe in others:
        pipe.close()  # else those would not end while this one lives
    os.close(writes)
    requests = os.fdopen(reads)
    try:
        sys.path[:0] = path
        importlib.import_module("samestep.worker")
        from samestep.records.files import prepare
        from samestep.tasks.fork_server import RECORDS
        from samestep.world.orphans import die_with_parent

        die_with_parent()
        prepare(*RECORDS)
        gc.freeze()  # a collection in a rank, as libraries ask for, skips a million objects that are imported already
        gc.enable()
        for line in requests:
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _rank_main(asked["environment"], asked["plans"], asked["log"])
            print(pid, file=answers, flush=True)
        with suppress(ChildProcessError):
            os.wait()  # for all, since SIGCHLD is ignored
    except BaseException:
        traceback.print_exc()
        for _ in requests:
            print(0, file=answers, flush=True)
    os._exit(0)


def _rank_main(environment: dict[str, str], plans: str, log: str) -> None:
    """The process of one rank, whose output goes to the file `log`. Never returns."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ |= environment
        import numpy

        random.seed()
        numpy.random.seed()  # else every rank would draw the same
        serve(plans)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def serve(plans: str) -> None:
    """Runs one plan after the other, as a rank of one process group."""
    import torch

    import samestep
    from samestep.rank import hardware
    from samestep.rank.group import process_group
    from samestep.records.collectives import CollectivePlan
    from samestep.records.files import read, write
    from samestep.records.plan import Plan, ReferencePlan
    from samestep.records.record import RankRecord
    from samestep.tasks.play_reference import play_reference
    from samestep.tasks.trainings import work
    from samestep.worker import rank_error
    from samestep.world import World
    from samestep.world.orphans import die_with_parent

    assert str(samestep.__file__).startswith(sys.path[0]), f"samestep comes from {samestep.__file__}"
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    with process_group(world), open(plans) as lines:
        about = (world.rank, world, torch.get_num_threads(), 0.0, hardware.facts(world.device))
        for line in lines:
            kind, _, path = line.strip().partition(" ")
            folder = Path(path).parent
            plan = read({"ReferencePlan": ReferencePlan, "CollectivePlan": CollectivePlan}.get(kind, Plan), Path(path))
            try:
                if isinstance(plan, CollectivePlan):
                    from samestep.tasks import collectives

                    record = RankRecord(*about, collectives=collectives.run(plan, world))
                elif isinstance(plan, ReferencePlan):
                    record = RankRecord(*about, layouts=play_reference(plan, world))
                else:
                    record = RankRecord(*about, trainings=work(plan, world)[0])
                write(folder / f"rank{world.rank}.json", record)
            except BaseException as error:
                write(folder / f"error-rank{world.rank}.json", rank_error(error, plan, world.rank))
                break
            if "deepspeed" not in sys.modules:  # it keeps its groups, and uses them again
                _destroy_subgroups()


def _destroy_subgroups() -> None:
    """Destroys the groups of device meshes. Each has threads that wake up all the time, and would stay for hundreds of
    proofs."""
    import torch.distributed as dist

    for group in [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else []:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    fork_ranks(sys.argv[1:])
