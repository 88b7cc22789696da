"""verify and compare on several machines: the other machines start their ranks of each launch of the first machine.

The first machine writes what it does to a file in a folder that all machines share, every second while it runs. The
other machines read that file; they need no connection.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from samestep.commands.inspected_setup import InspectedSetup
from samestep.commands.results_folder import package_digest
from samestep.errors import TrainingFailed, UserError
from samestep.launch import supervise
from samestep.launch.command import command_for
from samestep.records.files import as_json, read, write
from samestep.records.launch_request import LaunchRequest
from samestep.records.plan import EvaluateTask, RunTask
from samestep.records.redaction import redacted_values
from samestep.version import __version__

STATE = "first-machine.json"
MAX_SILENCE_S = 120.0  # seconds between two states of the first machine
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


def publish(inspected: InspectedSetup, folder: Path, launch: Launch | None = None) -> None:
    """Writes the state of the first machine: a new launch at once, otherwise at most once a second."""
    path = folder / STATE
    if launch is None and path.exists() and time.time() - path.stat().st_mtime < INTERVAL_S:
        return
    state = _state(folder) or FirstMachine(launch_request(inspected))
    write(path, replace(state, launch=launch or state.launch, written_at=time.time()))


@contextmanager
def publishing(inspected: InspectedSetup, folder: Path) -> Iterator[None]:
    """Publishes the state of the first machine: that it runs, and when the block has ended, in whatever way."""
    if inspected.machines.nnodes == 1 or inspected.machines.single_launch:
        yield
        return
    request = launch_request(inspected)
    write(folder / STATE, FirstMachine(request, written_at=time.time()))
    try:
        yield
    finally:
        write(folder / STATE, FirstMachine(request, ended=True, written_at=time.time()))


def join_launches(inspected: InspectedSetup, folder: Path) -> int:
    """Starts this machine's ranks of each launch, until the first machine has ended. Returns the number of launches.

    Raises UserError when the first machine's command differs, or writes no state for two minutes.
    """
    request = launch_request(inspected)  # once: it reads every file of samestep
    known, changed_at = _state(folder), time.monotonic()
    joined: list[Launch] = []
    while True:
        state = _state(folder)
        if state and state != known:
            known, changed_at = state, time.monotonic()
            check_agreement(request, state.asked, f"the first machine ({inspected.machines.master})")
            if state.ended:
                return len(joined)
            if state.launch and state.launch not in joined:
                joined.append(state.launch)
                _join(inspected, folder, state.launch)
        if time.monotonic() - changed_at > MAX_SILENCE_S:
            raise UserError(
                f"the first machine ({inspected.machines.master}) has written nothing in {folder} for "
                f"{MAX_SILENCE_S:.0f} s; check that it runs the same command, and that --out names a folder that the "
                "machines share"
            )
        time.sleep(0.05)


def _state(folder: Path) -> FirstMachine | None:
    with suppress(FileNotFoundError):
        return read(FirstMachine, folder / STATE)
    return None


def _join(inspected: InspectedSetup, folder: Path, launch: Launch) -> None:
    """Starts this machine's ranks of one launch. The first machine reports a failure, which the shared records show."""
    launch_folder = folder / launch.folder
    command = command_for(
        launch_folder / "plan.json", launch.launcher, launch.nproc, launch.devices, inspected.machines
    )
    with suppress(TrainingFailed, UserError):
        supervise.run(
            command,
            launch_folder,
            launch.size,
            deadline_s=inspected.setup.deadline_s,
            stall_s=inspected.setup.stall_s,
            machines=inspected.machines,
        )


# The fields of a planned training or evaluation that may differ between machines and when a training is continued:
MAY_DIFFER = {
    *("weights", "init", "export", "predictions"),  # paths; init_sha256 compares the weights that init names
    *("log", "profile", "checkpoint_every", "keep"),  # fields of what is written beside the weights
    *("spot_check", "spot_check_stops"),  # fields of what is checked beside the training
    *("resume", "resume_changed_data", "stop_after"),  # fields of where this launch begins and ends
    *("name", "kind"),  # of the plan
}


def launch_request(inspected: InspectedSetup, training: RunTask | EvaluateTask | None = None) -> LaunchRequest:
    """Returns what a command is to launch. training: of `run` and `evaluate`."""
    setup = inspected.setup
    return LaunchRequest(
        job=setup.job.rpartition("/")[2],
        source=inspected.job.source,
        settings=_words(redacted_values(setup.settings)),
        engine=",".join(setup.engines),
        engine_settings=_words(redacted_values(setup.engine_settings)),
        training=f"continued {setup.resume}" if setup.resume else options_of(training),
        samestep=f"{__version__} {package_digest()}",
        torch=inspected.inspection.machine.torch,
        mesh=str(setup.mesh or ""),
    )


def digest_of(request: LaunchRequest) -> str:
    """Returns a digest of a request, for a rendezvous that other machines may join later."""
    return hashlib.blake2b(json.dumps(as_json(request)).encode(), digest_size=8).hexdigest()


def check_agreement(request: LaunchRequest, others_request: LaunchRequest, who: str) -> None:
    """Raises UserError where this machine's command differs from that of `who`."""
    if different := request.difference(others_request):
        what, ours, others_value = different
        raise UserError(
            f"this machine's command differs from that of {who}: {what}: {ours} here, {others_value} there; "
            "run the same command on every machine, with the same files"
        )


def _words(values: Mapping[str, str]) -> str:
    """Returns 'a=1 b=2'. The path of a file that is here may be another on each machine: check_same_data reads it."""
    paths = {name for name, text in values.items() if "/" in text and Path(text).exists()}
    return " ".join(f"{name}={'(a path)' if name in paths else values[name]}" for name in sorted(values))


def options_of(training: RunTask | EvaluateTask | None) -> str:
    """Returns the options that decide what is trained or evaluated, 'every=2 patience=3', without those at defaults."""
    if training is None:
        return ""
    decisive = [field for field in fields(training) if field.name not in MAY_DIFFER]
    values = ((field, getattr(training, field.name)) for field in decisive)
    return " ".join(f"{field.name}={_word(value)}" for field, value in values if value != field.default)


def _word(value: object) -> str:
    return ":".join(value) if isinstance(value, tuple) else str(value)
