"""python -m samestep.worker PLAN.json: runs one rank, which does what the plan says and writes files. See tasks/.

    python -m samestep.worker PLAN.json               one rank; its number comes from the environment
    python -m samestep.worker --spawn 2 PLAN.json     starts the ranks itself, with torch.multiprocessing.spawn
    python -m samestep.worker --fork 2 PLAN.json      the same, by forking this process
    python -m samestep.worker --threads 2 PLAN.json   the same, as threads of this process
    python -m samestep.worker --ray 2 PLAN.json       the same, with Ray Train's TorchTrainer
    python -m samestep.worker --inspect QUERY.json    a job's sizes and faults, and which engines run here, as JSON
    python -m samestep.worker --eject QUERY.json      the script of a job on an engine
    python -m samestep.worker --probe QUERY.json      what torch and the engines' packages are here, for the doctor
    python -m samestep.worker --try RANK.json         a rank of a doctor's trial
    python -m samestep.worker --reference PLAN.json   the reference, for every layout in the plan
    python -m samestep.worker --replay-steps PLAN.json  replays steps of a training that goes on
    python -m samestep.worker --test-rank SOCKET      a rank of the pytest plugin's tests
    python -m samestep.worker --fork-server ranks     forks workers on request, each with one of these lines

A rank writes `rankR.json` and `rankR.NAME.npz` in the plan's folder, or `error-rankR.json` and exits with code 1
(2 for a UserError).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from samestep.rank import import_torch  # noqa: F401  (before what imports torch)

# isort: split
import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from samestep.errors import LONGEST_MESSAGE, Refused, SamestepError, UserError, printable_message
from samestep.message import as_said
from samestep.rank import hardware
from samestep.rank.log_output import log_thread_to, log_to
from samestep.rank.membership import hostname, says_lost
from samestep.rank.threaded_group import Turns
from samestep.recorder import fork_rendezvous
from samestep.records.collectives import PLAN as COLLECTIVES
from samestep.records.collectives import CollectivePlan
from samestep.records.files import naming_full_disks, read, replace_text, write, write_json
from samestep.records.plan import Plan, ReferencePlan
from samestep.records.record import ATTEMPT, ENVIRONMENT, SAVE_VARIABLES, RankError, RankRecord
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import PLAN as SCRIPT
from samestep.records.script_plan import ScriptPlan
from samestep.tasks import fork_server
from samestep.tasks.answer import eject_main, inspect_main, probe_main
from samestep.tasks.play_reference import play_reference
from samestep.tasks.trainings import close, is_lost_peer, work
from samestep.tasks.try_group import try_main
from samestep.tasks.try_hypotheses import try_hypotheses
from samestep.world import RANK_VARIABLES, World, places
from samestep.world.heartbeat import file_of, heartbeat
from samestep.world.processes import die_with_parent, end_children
from samestep.world.regular_files import make_named_folder, open_new, remove_file

ROOM = 1 << 15  # bytes
AnyPlan = TypeVar("AnyPlan", Plan, ReferencePlan, CollectivePlan, ScriptPlan)


def rank_main(path: str, kind: type[AnyPlan], do: Callable[[AnyPlan, RankRecord], RankRecord | ScriptRecord]) -> None:
    """Runs one rank, as run_rank does, and ends this process with its exit code.

    It ends with os._exit: in a normal exit of the interpreter gloo's threads abort about one in three healthy
    processes.
    """
    die_with_parent()
    code = run_rank(path, kind, do)
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def threads_main(size: int, path: str) -> None:
    """Runs the ranks as threads of this process, and ends it with the exit code of the first that fails. On SIGUSR1
    each rank's stack goes to its own file."""
    gpus = {*os.environ.get("SAMESTEP_DEVICES", "cpu").split(",")} - {"cpu"}
    folder, turns = Path(path).parent, Turns(size, sorted(gpus))
    # They stay open: a process that has a stack's file open can be asked for it.
    files = [open_new(folder / f"stack-rank{rank}.txt", buffering=0) for rank in range(size)]

    def write_stacks(*_: object) -> None:
        for rank, stack in turns.stacks().items():
            files[rank].write(stack.encode())

    signal.signal(signal.SIGUSR1, write_stacks)
    # This handler alone runs where a thread lets no other run, as in a loop of a C library.
    log = open_new(folder / "stacks-of-threads.txt")
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True, chain=True)
    faulthandler.enable(log)
    code = turns.run(lambda: run_rank(path, Plan, run_trainings, is_thread=True))
    end_children()
    os._exit(code)


def run_rank(
    path: str,
    kind: type[AnyPlan],
    do: Callable[[AnyPlan, RankRecord], RankRecord | ScriptRecord],
    *,
    is_thread: bool = False,
) -> int:
    """Runs one rank: reads the plan at `path`, calls `do`, and writes the record that it returns, or the error. Returns
    the exit code."""
    plan = read(kind, Path(path))
    folder = Path(plan.out)
    rank = places(os.environ)[0]
    _prepare_files(folder, rank)
    if is_thread:
        log_thread_to(folder / f"rank{rank}.log")
    else:
        _prepare_process(folder, rank)
    room = folder / f".room-rank{rank}"  # kept on the disk for the sentence about a disk that is full
    with open_new(room) as file:
        file.write(bytes(ROOM))
    torch.set_num_threads(1)
    code = 0
    try:
        world = replace(World.from_env(os.environ), mesh=plan.mesh if isinstance(plan, Plan) else None)
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}  # libraries read only torchrun's names
        os.environ |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
        machine = hardware.facts(world.device, hostname(), os.environ.get("GLOO_SOCKET_IFNAME"))
        record = RankRecord(world.rank, world, torch.get_num_threads(), plan.started_at, machine)
        done = do(plan, record)
        make_named_folder(folder)  # somebody may have removed it while the training went on
        remove_file(room)
        with naming_full_disks():
            write(folder / f"rank{rank}.json", done)
    except BaseException as error:
        with suppress(OSError):  # else the command finds out that the disk is full
            remove_file(room)
            write(folder / f"error-rank{rank}.json", rank_error(error, plan, rank))
        code = 2 if isinstance(error, UserError) else 1
        sys.stderr.write(traceback.format_exc())  # print() may be the script's own
    return code


def rank_error(error: BaseException, plan: Plan | ReferencePlan | CollectivePlan | ScriptPlan, rank: int) -> RankError:
    """Returns the record of an error that ended a rank. Call it while the error is handled, for its traceback."""
    kind: Literal["user", "refused", "crash"] = "crash"
    if isinstance(error, UserError):
        kind = "refused" if isinstance(error, Refused) else "user"
    if isinstance(error, SamestepError):
        said = error.message
    else:
        said = as_said(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    lost = is_lost_peer(plan, error) if isinstance(plan, Plan) else says_lost(error)
    trace = traceback.format_exc()[-LONGEST_MESSAGE:]
    return RankError(rank, kind, printable_message(said), time.time(), trace, lost)


def run_trainings(plan: Plan, record: RankRecord) -> RankRecord:
    """Runs the plan's trainings; returns the record with what this rank observed."""
    trainings, threads = work(plan, record.world)
    close(plan)
    return replace(record, trainings=trainings, threads=threads)


def run_reference(plan: ReferencePlan, record: RankRecord) -> RankRecord:
    """Plays the reference; returns the record with every layout that was played, or every fault that was tried."""
    hardware.set_threads(plan.threads, 1)
    if plan.suspect:
        return replace(record, trials=try_hypotheses(plan, record.world))
    return replace(record, layouts=play_reference(plan, record.world))


def run_collectives(plan: CollectivePlan, record: RankRecord) -> RankRecord:
    """Calls the plan's collectives; returns the record with what all ranks observed, on rank 0."""
    from samestep.tasks import collectives  # it imports more of torch.distributed

    return replace(record, collectives=collectives.run(plan, record.world))


def launched_rank_main(path: str) -> None:
    """Runs one rank of a launch; the name of the plan's file says of what. Never returns."""
    if Path(path).name == COLLECTIVES:
        rank_main(path, CollectivePlan, run_collectives)
    if Path(path).name == SCRIPT:
        from samestep.recorder.run_script import run_script  # here: no training needs it

        rank_main(path, ScriptPlan, run_script)
    rank_main(path, Plan, run_trainings)


def _prepare_files(folder: Path, rank: int) -> None:
    """Opens this rank's heartbeat, and writes its pid file."""
    for old in (folder / f"rank{rank}.json", folder / f"error-rank{rank}.json"):  # of an attempt before a restart
        remove_file(old)
    if ATTEMPT in os.environ:
        _forget_other_numbers(folder)
    heartbeat.open(file_of(folder, rank))
    replace_text(folder / f"pid-rank{rank}", f"{os.getpid()}@{socket.gethostname()}")


def _prepare_process(folder: Path, rank: int) -> None:
    """Opens this rank's log for all that its process prints, and dumps its stacks on SIGUSR1."""
    if hasattr(signal, "SIGUSR2") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a request to stop that comes before the training
    log_to(folder / f"rank{rank}.log")
    if rank == 0 and SAVE_VARIABLES in os.environ:
        saved = {name: os.environ[name] for name in os.environ[SAVE_VARIABLES].split(",") if name in os.environ}
        write_json(folder / ENVIRONMENT, saved, private=True)
    if hasattr(signal, "SIGUSR1"):  # the parent sends it when the rank hangs
        stacks = open_new(folder / f"stack-rank{rank}.txt")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)


def _forget_other_numbers(folder: Path) -> None:
    """Removes the files of ranks that this machine no longer has: it gets others when a machine has left or joined."""
    rank, _, local_rank, local_size, _ = places(os.environ)
    local_ranks = range(rank - local_rank, rank - local_rank + local_size)
    for path in folder.glob("*rank[0-9]*"):
        match = re.fullmatch(r"(?:(?:pid|heartbeat|error)-)?rank(\d+)(?:\.json)?", path.name)
        if match and int(match[1]) not in local_ranks:
            remove_file(path)


def _spawned(local_rank: int, size: int, path: str, listening: int | None = None) -> None:
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    os.environ.pop(RANK_VARIABLES, None)  # these are torchrun's
    if listening is not None:
        fork_rendezvous.serve(listening, local_rank)
    launched_rank_main(path)


def spawn_main(size: int, path: str, start_method: str) -> None:
    """Starts the ranks and waits for them. When one fails, prints each one's exit code as torchrun does."""
    listening = fork_rendezvous.listen() if start_method == "fork" and Path(path).name == SCRIPT else None
    ranks = start_processes(_spawned, args=(size, path, listening), nprocs=size, join=False, start_method=start_method)
    if listening is not None:
        os.close(listening)  # rank 0 has it
    try:
        while not ranks.join():
            pass
    except ProcessException as error:
        print(error, file=sys.stderr)
        for rank, process in enumerate(ranks.processes):
            print(f"rank : {rank} (local_rank: {rank})\nexitcode : {process.exitcode}", file=sys.stderr)
        raise SystemExit(1) from None


def ray_rank(path: str) -> int:
    """Runs one rank in a worker of Ray Train, which ends the process. Returns the exit code."""
    os.environ.pop(RANK_VARIABLES, None)
    return run_rank(path, Plan, run_trainings)


def main(arguments: list[str]) -> None:
    """Runs the worker that `arguments` name: see the module's docstring."""
    match arguments:
        case ["--inspect", path]:
            die_with_parent()
            inspect_main(path)
            end_children()
            os._exit(0)  # without waiting for threads that the job started
        case ["--eject", path]:
            die_with_parent()
            eject_main(path)
            end_children()
            os._exit(0)
        case ["--probe", path]:
            die_with_parent()
            probe_main(path)
            end_children()
            os._exit(0)
        case ["--try", path]:
            die_with_parent()
            try_main(path)
        case ["--reference", path]:
            rank_main(path, ReferencePlan, run_reference)
        case ["--replay-steps", path]:
            from samestep.tasks.replay_step import replay_main  # a run with spot checks alone needs it

            replay_main(path)
            end_children()
            os._exit(0)
        case ["--spawn", size, path]:
            die_with_parent()
            spawn_main(int(size), path, "spawn")
        case ["--fork", size, path]:
            die_with_parent()
            spawn_main(int(size), path, "fork")
        case ["--threads", size, path]:
            die_with_parent()
            threads_main(int(size), path)
        case ["--ray", size, path]:
            from samestep import worker  # the ranks cannot import __main__
            from samestep.tasks import ray_ranks

            die_with_parent()
            ray_ranks.start(int(size), partial(worker.ray_rank, path), str(Path(path).parent))
        case ["--test-rank", path]:
            from samestep.tasks import rank_tests  # needs pytest

            rank_tests.run(path)
            os._exit(0)
        case ["--fork-server", of]:
            fork_server.serve(of, main)
        case ["--fork-server", of, "--listen", path, *preloads]:
            fork_server.listen(of, path, preloads, main)
        case [path]:
            launched_rank_main(path)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
