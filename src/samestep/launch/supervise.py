"""Starting a plan: one process tree that ends when we end, its output in files."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samestep import launch
from samestep.errors import TrainingFailed, say
from samestep.launch import Machines, Plan, first_error, oom_kills
from samestep.launch.end import end, is_here, pids_here, ranks_here, signal_ranks
from samestep.launch.stale_locks import clear_stale_locks
from samestep.records.record import Record, told, write_json
from samestep.world import STARTED_BY, network
from samestep.world.launched_by import Started
from samestep.world.orphans import COMMAND, die_with_parent, this_command

ENDING_S = 10.0  # a launcher that stays when every rank has written its record is ended after so long
SETTLE_S = 1.5  # one whose ranks have all died, too; torchrun would wait minutes for other machines


def planned(
    asked: Mapping[str, Any],
    launcher: str,
    nproc: int,
    devices: Sequence[str],
    folder: Path,
    machines: Machines,
    flags: Sequence[str] = (),
) -> Plan:
    """Writes plan.json into `folder`, and returns the command that has `nproc` workers here do what is `asked`."""
    path = folder / "plan.json"
    write_json(path, {"out": str(folder), "started_at": time.time(), **asked})
    return plan_for(path, launcher, nproc, devices, machines, flags)


def plan_for(
    path: Path, launcher: str, nproc: int, devices: Sequence[str], machines: Machines, flags: Sequence[str] = ()
) -> Plan:
    """The command that has `nproc` workers here do what the file `path` asks."""
    shape = launch.Shape(nproc, str(path.parent), machines)
    plan = launch.load(launcher).plan(("-m", "samestep.worker", *flags, str(path)), shape)
    return Plan(plan.argv, {**_environment(devices, machines), **plan.env}, plan.ends_by)


def _environment(devices: Sequence[str], machines: Machines) -> dict[str, str]:
    """What every rank is told, whoever starts it."""
    env = {
        "OMP_NUM_THREADS": "1",
        "SAMESTEP_TIMEOUT_S": f"{machines.timeout_s:g}",
        "SAMESTEP_DEVICES": ",".join(devices),
    }
    if machines.interface:
        env |= network.check_interface(machines.interface)
    return env


def inside(path: Path, started: Started, devices: Sequence[str], machines: Machines) -> Plan:
    """The command that becomes one rank of those that somebody's launcher has started, whose variables it keeps."""
    env = _environment(devices, machines) | {STARTED_BY: started.launcher, "SAMESTEP_RUN": started.id}
    if started.launcher != "torchrun":  # the store of a run with its own name: all ranks of one machine can find it
        meeting = (
            f"file://{Path(tempfile.gettempdir()).resolve()}/samestep-{os.getuid()}-{started.launcher}-{started.id}"
        )
        env["SAMESTEP_INIT_METHOD"] = started.meeting or meeting
    return Plan((sys.executable, "-m", "samestep.worker", str(path)), env)


def shell_line(plan: Plan) -> str:
    """`plan` as one line that works when pasted into a shell."""
    return shlex.join(["env", *(f"{key}={value}" for key, value in plan.env.items()), *plan.argv])


def run(
    plan: Plan,
    folder: Path,
    size: int,
    *,
    deadline_s: float | None = None,
    watch: Callable[[dict[str, Any]], None] | None = None,
    machines: Machines = Machines(),  # noqa: B008 - frozen
    graceful: bool = False,
) -> Record:
    """Starts `plan`, waits for its end, returns the record of the `size` ranks that write into `folder`.

    watch: given what they tell, about ten times a second. deadline_s: after it, each rank's stack goes to
    stack-rankR.txt in `folder` and the tree is killed. graceful: an interrupt asks the ranks to stop after a step; a
    second one ends them. Raises UserError or TrainingFailed with the first failing rank's own sentence. However this
    function ends, the tree has ended too.
    """
    for lock in clear_stale_locks(os.environ):
        say(f"removed {lock}, which a killed build had left")
    began = time.monotonic()
    killed_before = oom_kills.kills()
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns that addresses have no names
    environment = quiet | os.environ | {"PYTHONUNBUFFERED": "1", COMMAND: this_command()} | dict(plan.env)
    own = f"-{socket.gethostname()}" if machines.nnodes > 1 else ""  # the folder may be shared
    with open(folder / f"log{own}.txt", "ab") as output:
        tree = subprocess.Popen(
            plan.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the tree
            preexec_fn=partial(_born, plan.ends_by) if sys.platform != "win32" else None,
        )
    idle_since: float | None = None  # no rank lives here since then
    asked_to_stop, asked_attempt = False, None
    wishes: list[int] = []  # of a scheduler, which sends SIGUSR1 some time before its limit
    if graceful and hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, lambda number, _: wishes.append(number))
    try:
        while tree.poll() is None:
            try:
                now = told(folder) if watch or graceful else {}
                if watch:
                    watch(now)
                if wishes and not asked_to_stop and "done" in now:
                    asked_to_stop = _stops("asked by SIGUSR1")
                if asked_to_stop and "done" in now and now["attempt"] != asked_attempt:
                    asked_attempt = now["attempt"]  # those that torchrun has started again are asked again
                    signal_ranks(folder, signal.SIGUSR2)
                late = deadline_s is not None and time.monotonic() - began > deadline_s
                if late and tree.poll() is None:  # looking at what they print takes time too
                    signal_ranks(folder, signal.SIGUSR1)  # each writes its stack
                    time.sleep(0.5)
                    raise TrainingFailed(
                        f"nothing ended within {deadline_s:.0f} s; where each rank stood is in {folder}/stack-rank*.txt"
                    )
                if pids_here(folder) and not ranks_here(folder):
                    idle_since = idle_since or time.monotonic()
                    if time.monotonic() - idle_since > _patience(folder, machines):
                        break
                else:
                    idle_since = None
                time.sleep(0.1 if watch else 0.02)
            except KeyboardInterrupt:
                if not graceful or asked_to_stop or "done" not in told(folder):
                    raise
                asked_to_stop = _stops("interrupt again to end at once")
    finally:
        end(tree, folder)
    if tree.returncode == 0 and machines.nnodes > 1 and not list(folder.glob("error-rank*")):
        _await_records(folder, size)
    record = Record(folder)
    first_error.raise_if_failed(record, tree, size, machines, oom_kills.kills() - killed_before)
    return record


def _stops(why: str) -> bool:
    say(f"stopping after a step; {why}")
    return True


def _born(ends_by: signal.Signals) -> None:
    """In the new process, before it becomes the launcher."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a step; launchers die of it
    die_with_parent(by=ends_by)


def _patience(folder: Path, machines: Machines) -> float:
    """Seconds that a launcher may go on without a living rank on this machine."""
    here = [path.name.removeprefix("pid-") for path in folder.glob("pid-rank*") if is_here(path)]
    if all((folder / f"{rank}.json").exists() for rank in here):
        return ENDING_S if machines.nnodes == 1 else machines.timeout_s  # torchrun waits for the other machines' ranks
    return machines.timeout_s if machines.max_restarts else SETTLE_S


def _await_records(folder: Path, size: int) -> None:
    """A shared folder may show another machine's record a little later than the launcher ended."""
    until = time.monotonic() + ENDING_S
    while len(list(folder.glob("rank[0-9]*.json"))) < size and time.monotonic() < until:
        time.sleep(0.1)
