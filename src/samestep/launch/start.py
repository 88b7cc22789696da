"""Starting a plan: one process tree that ends when we end, its output in a file, its first error told once."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from samestep import launch
from samestep.errors import Refused, TrainingFailed, UserError
from samestep.launch import Plan
from samestep.lifeline import COMMAND, die_with_parent
from samestep.record import Record, told, write_json

GRACE_S = 3.0  # between asking a tree to end and killing it
ENDING_S = 10.0  # a rank that has left without a record takes the others with it after so long


def check_port(port: int) -> None:
    """Raises UserError when something listens on this port already."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UserError(f"port {port} is taken{_holder(port)}; choose another, or --port 0 for any") from None


def _holder(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def work(
    asked: Mapping[str, Any],
    launcher: str,
    size: int,
    devices: Sequence[str],
    folder: Path,
    *,
    flags: Sequence[str] = (),
    port: int = 0,
    deadline_s: float | None = None,
    watch: Callable[[dict[str, Any]], None] | None = None,
) -> Record:
    """Has `size` workers do what is `asked`, started by `launcher`; `folder` is theirs. watch: given what they tell."""
    path = folder / "plan.json"
    write_json(path, {"out": str(folder), "started_at": time.time(), **asked})
    shape = launch.Shape(size, str(folder), port)
    plan = launch.load(launcher).plan(("-m", "samestep.worker", *flags, str(path)), shape)
    plan = Plan(plan.argv, {**plan.env, "SAMESTEP_DEVICES": ",".join(devices)})
    look = (lambda: watch(told(folder))) if watch else None
    return run(plan, folder, size, deadline_s=deadline_s, watch=look)


def run(
    plan: Plan, folder: Path, size: int, *, deadline_s: float | None = None, watch: Callable[[], None] | None = None
) -> Record:
    """Starts `plan`, waits for its end, returns the record of its `size` ranks.

    watch: called about ten times a second. deadline_s: after it, each rank's stack goes to stack-rankR.txt in
    `folder` and the tree is killed. Raises UserError or TrainingFailed with the first failing rank's own sentence.
    However this function ends, the tree has ended too.
    """
    began = time.monotonic()
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", COMMAND: str(os.getpid())} | dict(plan.env)
    )
    log = folder / "log.txt"
    with open(log, "ab") as output:
        tree = subprocess.Popen(
            plan.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the tree
            preexec_fn=die_with_parent if sys.platform != "win32" else None,
        )
    try:
        while tree.poll() is None:
            if watch:
                watch()
            if deadline_s is not None and time.monotonic() - began > deadline_s:
                _show_stacks(folder)
                raise TrainingFailed(
                    f"nothing ended within {deadline_s:.0f} s; where each rank stood is in {folder}/stack-rank*.txt"
                )
            if _all_written(folder, size) and _older_than(folder, ENDING_S):
                break  # every rank has written its record; a launcher that does not leave is ended below
            time.sleep(0.1 if watch else 0.02)
    finally:
        end(tree)
    record = Record(folder)
    _raise_if_failed(record, tree, size, log)
    return record


def end(tree: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started: asks, waits, kills, by pid."""
    if tree.poll() is not None:
        return  # its ranks are tied to it and have ended with it; its pid may be another's by now
    root = psutil.Process(tree.pid)
    members = [*root.children(recursive=True), root]
    for member in members:
        _signal(member, signal.SIGTERM)
    _, left = psutil.wait_procs(members, timeout=GRACE_S)
    for member in left:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(left, timeout=GRACE_S)
    tree.wait()


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _all_written(folder: Path, size: int) -> bool:
    return all((folder / f"rank{rank}.json").exists() for rank in range(size))


def _older_than(folder: Path, seconds: float) -> bool:
    newest = max(path.stat().st_mtime for path in folder.glob("rank*.json"))
    return time.time() - newest > seconds


def _show_stacks(folder: Path) -> None:
    for path in folder.glob("pid-rank*"):
        try:
            psutil.Process(int(path.read_text())).send_signal(signal.SIGUSR1)
        except (psutil.NoSuchProcess, ValueError):
            continue
    time.sleep(0.5)


def _raise_if_failed(record: Record, tree: subprocess.Popen[bytes], size: int, log: Path) -> None:
    """Raises with the cause that came first. A rank that lost its peer's connection only tells of another's end."""
    error = record.error()
    killed = _killed_rank(log)
    if error and error["kind"] in ("user", "refused"):
        raise (Refused if error["kind"] == "refused" else UserError)(error["message"])
    if error and not (error["lost_peer"] and killed):
        raise TrainingFailed(f"rank {error['rank']} failed: {error['message']} (its traceback is in {log})")
    if killed:
        raise TrainingFailed(f"rank {killed[0]} was ended by {killed[1]}; what it last said is in {log}")
    if not record.complete(size):
        silent = ", ".join(str(r) for r in range(size) if not (record.folder / f"rank{r}.json").exists())
        code = tree.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise TrainingFailed(f"the launcher {how} and rank {silent} left no record; what they said is in {log}")


def _killed_rank(log: Path) -> tuple[str, str] | None:
    """(rank, signal) of a rank that a signal ended, as the launcher reports it; it ends the others with SIGTERM."""
    pattern = r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+)"
    ended = re.findall(pattern, log.read_text(errors="replace"))
    signals = [(rank, signal.Signals(int(number)).name) for rank, number in ended]
    return next((pair for pair in signals if pair[1] != "SIGTERM"), None)
