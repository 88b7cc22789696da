"""verify and compare on several machines: the other machines start their ranks of each launch of the first machine.

The first machine writes what it does to a file in a folder that all machines share, every second while it runs. The
other machines read that file; they need no connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.commands.agreement import check_agreement, launch_request
from samestep.commands.study import Study
from samestep.errors import TrainingFailed, UserError
from samestep.launch import supervise
from samestep.launch.command import command_for
from samestep.records.files import read, write
from samestep.records.plan import LaunchRequest

STATE = "first-machine.json"
MAX_SILENCE_S = 120.0  # between two states of the first machine
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Launch:
    """A launch on several machines, each of which starts its own ranks. folder: inside the shared one. nproc: ranks on
    each machine; size: on all machines. started_at: seconds since 1970; differs when a launch is started again."""

    folder: str
    launcher: str
    nproc: int
    size: int
    devices: tuple[str, ...]
    started_at: float


@dataclass(frozen=True)
class FirstMachine:
    """The state of the first machine. asked: what its command trains. launch: the latest one. written_at: in
    seconds since 1970."""

    asked: LaunchRequest
    launch: Launch | None = None
    ended: bool = False
    written_at: float = 0.0


def publish(study: Study, folder: Path, launch: Launch | None = None) -> None:
    """Writes the state of the first machine: a new launch at once, otherwise at most once a second."""
    path = folder / STATE
    if launch is None and path.exists() and time.time() - path.stat().st_mtime < INTERVAL_S:
        return
    state = _state(folder) or FirstMachine(launch_request(study))
    write(path, replace(state, launch=launch or state.launch, written_at=time.time()))


@contextmanager
def publishing(study: Study, folder: Path) -> Iterator[None]:
    """Publishes the state of the first machine: that it runs, and when the block has ended, in whatever way."""
    if study.machines.nnodes == 1 or study.machines.single_launch:
        yield
        return
    request = launch_request(study)
    write(folder / STATE, FirstMachine(request, written_at=time.time()))
    try:
        yield
    finally:
        write(folder / STATE, FirstMachine(request, ended=True, written_at=time.time()))


def join_launches(study: Study, folder: Path) -> int:
    """Starts this machine's ranks of each launch, until the first machine has ended. Returns the number of launches.

    Raises UserError when the first machine's command differs, or writes no state for two minutes.
    """
    request = launch_request(study)  # once: it reads every file of samestep
    known, changed_at = _state(folder), time.monotonic()
    joined: list[Launch] = []
    while True:
        state = _state(folder)
        if state and state != known:
            known, changed_at = state, time.monotonic()
            check_agreement(request, state.asked, f"the first machine ({study.machines.master})")
            if state.ended:
                return len(joined)
            if state.launch and state.launch not in joined:
                joined.append(state.launch)
                _join(study, folder, state.launch)
        if time.monotonic() - changed_at > MAX_SILENCE_S:
            raise UserError(
                f"the first machine ({study.machines.master}) has written nothing in {folder} for {MAX_SILENCE_S:.0f} "
                "s; check that it runs the same command, and that --out names a folder that the machines share"
            )
        time.sleep(0.05)


def _state(folder: Path) -> FirstMachine | None:
    with suppress(FileNotFoundError):
        return read(FirstMachine, folder / STATE)
    return None


def _join(study: Study, folder: Path, launch: Launch) -> None:
    """Starts this machine's ranks of one launch. The first machine reports a failure, which the shared records show."""
    launch_folder = folder / launch.folder
    command = command_for(launch_folder / "plan.json", launch.launcher, launch.nproc, launch.devices, study.machines)
    with suppress(TrainingFailed, UserError):
        supervise.run(
            command,
            launch_folder,
            launch.size,
            deadline_s=study.setup.deadline_s,
            stall_s=study.setup.stall_s,
            machines=study.machines,
        )
