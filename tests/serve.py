"""A fork server for the ranks of tests: it imports torch once, and forks every rank that a test asks for.

    python tests/serve.py SOCKET

Starting a rank costs seconds and proving a small job a fraction of one. So tests that prove hundreds of jobs keep
their ranks, and tests that plant a fault, whose ranks must be new, fork them from a process that has torch already.

Libraries may change torch for the whole process. So for each set of them a process is forked that imports them, and
from that one for each folder with a source of samestep, which imports it; all ranks of both are forked from there.

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
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

# For the servers; the ranks import samestep from the folder that a request names.
from samestep.world.connections import accept, listen
from samestep.world.processes import die_with_parent

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

NAME = "test-ranks"  # of the socket, in the folder of a lane's fork servers
KEPT_SOURCES = 4  # of samestep itself, and of copies with a planted fault: one of each process of a lane
LINE = 1 << 20  # bytes, of a request


def serve_connections(path: str) -> None:
    """Listens at a Unix socket, has a rank forked for each connection, and sends its pid. Never returns.

    A connection sends a line of JSON: the rank's 'environment', the 'libraries' to import, the 'path' to import
    samestep from, 'plans' and 'log' (the rank's pipe and its output). The answer is 0 where an import failed.
    """
    die_with_parent()
    gc.disable()  # what is imported stays: collections meanwhile take a tenth of the time
    for name in PRELOADED:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep"]:
        del sys.modules[name]  # that of this interpreter, which torch has loaded for its rendezvous, too
    with_libraries: dict[str, socket.socket] = {}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is forked leaves no zombies
    listening = listen(Path(path))
    while True:
        with accept(listening) as connection:
            line = connection.makefile("rb").readline()
            if line.endswith(b"\n"):  # else the client has gone
                key = json.loads(line)["libraries"]
                _hand_on(line, connection.fileno(), with_libraries, key, _with_libraries, key.split())


def _hand_on(
    line: bytes,
    connection: int,
    servers: dict[str, socket.socket],
    key: str,
    serve: Callable[..., None],
    *given: object,
) -> None:
    """Sends a request to the process of this key, which is forked where there is none, or where it has ended."""
    for _ in range(2):
        if key not in servers:
            servers[key] = _forked(serve, *given)
        try:
            socket.send_fds(servers[key], [line], [connection])
            return
        except OSError:  # it has ended
            servers.pop(key).close()


def _forked(serve: Callable[..., None], *arguments: object) -> socket.socket:
    """Forks a process that calls serve(requests, *arguments), with one end of a pair of sockets. Returns the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        die_with_parent()
        ours.close()
        serve(theirs, *arguments)
    except BaseException:
        traceback.print_exc()
        for _, connection in _received(theirs):
            with suppress(OSError):  # the client has gone
                os.write(connection, b"0\n")
    finally:
        os._exit(0)  # it must not go on as the process that it was forked from


def _received(requests: socket.socket) -> Iterator[tuple[bytes, int]]:
    """Each request with its connection, which is closed afterwards."""
    while True:
        line, connections, _, _ = socket.recv_fds(requests, LINE, 1)
        if not line:
            return
        try:
            yield line, connections[0]
        finally:
            os.close(connections[0])


def _with_libraries(requests: socket.socket, libraries: list[str]) -> None:
    """Imports libraries, and hands each request on to a process that has imported samestep from its path."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an import may run a program
    for name in libraries:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sources: dict[str, socket.socket] = {}  # the path to import from -> the process that has
    for line, connection in _received(requests):
        path = json.loads(line)["path"]
        if str(path) in sources:
            sources[str(path)] = sources.pop(str(path))  # the last one: that which was used latest
        _hand_on(line, connection, sources, str(path), _with_samestep, path, sources, requests)
        for oldest in [*sources][:-KEPT_SOURCES]:
            sources.pop(oldest).close()


def _with_samestep(
    requests: socket.socket, path: list[str], others: Mapping[str, socket.socket], parents: socket.socket
) -> None:
    """Imports samestep from `path`, and forks a rank for each request. Returns when no more come and its ranks have
    ended. others, parents: the sockets of processes, which would not be seen to end while this one has them, too."""
    for other in (*others.values(), parents):
        other.close()
    sys.path[:0] = path
    importlib.import_module("samestep.worker")
    from samestep.records.files import prepare
    from samestep.tasks.fork_server import RECORDS

    prepare(*RECORDS)
    gc.freeze()  # a collection in a rank, as libraries ask for, skips a million objects that are imported already
    gc.enable()
    for line, connection in _received(requests):
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(connection)
            requests.close()
            run = serve_threads if asked.get("threads") else serve
            _rank_main(asked["environment"], asked["plans"], asked["log"], run)
        with suppress(OSError):  # the client has gone
            os.write(connection, f"{pid}\n".encode())
    with suppress(ChildProcessError):
        os.wait()  # for all, since SIGCHLD is ignored


def _rank_main(environment: dict[str, str], plans: str, log: str, run: Callable[[str], None]) -> None:
    """The process of one rank, whose output goes to the file `log`. run: is given `plans`. Never returns."""
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
        run(plans)
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
    from samestep.rank.process_group import process_group
    from samestep.records.collectives import CollectivePlan
    from samestep.records.files import read, write
    from samestep.records.plan import Plan, ReferencePlan
    from samestep.records.record import RankRecord
    from samestep.tasks.trainings import work
    from samestep.worker import rank_error, run_reference
    from samestep.world import World

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
                    record = run_reference(plan, RankRecord(*about))
                else:
                    arranged = replace(world, mesh=plan.mesh)
                    record = RankRecord(world.rank, arranged, *about[2:], trainings=work(plan, arranged)[0])
                write(folder / f"rank{world.rank}.json", record)
            except BaseException as error:
                write(folder / f"error-rank{world.rank}.json", rank_error(error, plan, world.rank))
                break
            if "deepspeed" not in sys.modules:  # it keeps its groups, and uses them again
                _destroy_subgroups()


def serve_threads(plans: str) -> None:
    """Runs one plan after the other, each in a process whose threads are the ranks."""
    from samestep.worker import threads_main

    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with open(plans) as lines:
        for line in lines:
            pid = os.fork()
            if pid == 0:
                threads_main(int(os.environ["WORLD_SIZE"]), line.split()[1])
            os.waitpid(pid, 0)


def _destroy_subgroups() -> None:
    """Destroys the groups of device meshes. Each has threads that wake up all the time, and would stay for hundreds of
    proofs."""
    import torch.distributed as dist

    for group in [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else []:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    serve_connections(sys.argv[1])
