"""The command that starts a plan's workers, and what every rank is told by its environment."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep import launch
from samestep.launch import Command, Machines
from samestep.launch.started_by import Started
from samestep.records.record import TELL
from samestep.world import network


def command_for(
    path: Path, launcher: str, nproc: int, devices: Sequence[str], machines: Machines, flags: Sequence[str] = ()
) -> Command:
    """The command that has `nproc` workers here do what the file `path` asks."""
    shape = launch.Shape(nproc, str(path.parent), machines)
    module = launch.load(launcher)
    command = module.plan(("-m", "samestep.worker", *flags, str(path)), shape)
    return replace(command, env={**_environment(devices, machines), **_tells(module), **command.env})


def _tells(module: launch.Launcher) -> dict[str, str]:
    """The variables whose values rank 0 writes into its folder, for a launcher that has to know them at the end."""
    names = getattr(module, "TELL", ())
    return {TELL: ",".join(names)} if names else {}


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


def inside_command(path: Path, started: Started, devices: Sequence[str], machines: Machines) -> Command:
    """The command that becomes one rank of those that somebody's launcher has started, whose variables it keeps."""
    module = launch.load(started.launcher)
    env = _environment(devices, machines) | _tells(module) | module.VARIABLES.environment()
    env |= {"SAMESTEP_RUN": started.id}
    if started.launcher != "torchrun":  # the store of a run with its own name: all ranks of one machine can find it
        meeting = (
            f"file://{Path(tempfile.gettempdir()).resolve()}/samestep-{os.getuid()}-{started.launcher}-{started.id}"
        )
        env["SAMESTEP_INIT_METHOD"] = started.meeting or meeting
    return Command((sys.executable, "-m", "samestep.worker", str(path)), env)


def shell_line(command: Command) -> str:
    """`command` as one line that works when pasted into a shell."""
    return shlex.join(["env", *(f"{key}={value}" for key, value in command.env.items()), *command.argv])
