"""Builds the command that starts a plan's workers, and the environment variables of every rank."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from samestep import launch
from samestep.launch import Command, Machines
from samestep.launch.outer_launcher import LaunchedRank
from samestep.records.record import SAVE_VARIABLES
from samestep.world import network
from samestep.world.connections import make_private
from samestep.world.imports import module_arguments


def command_for(
    path: Path, launcher: str, nproc: int, devices: Sequence[str], machines: Machines, flags: Sequence[str] = ()
) -> Command:
    """Builds the command that starts `nproc` workers on this machine with the plan in the file `path`."""
    shape = launch.Shape(nproc, str(path.parent), machines)
    starter = launch.load(launcher)
    command = starter.plan((*module_arguments("samestep.worker"), *flags, str(path)), shape)
    env = {**_environment(devices, machines), **_saved_variables(starter), **command.env}
    return replace(command, env=env, launchers=(launcher,))


def shared_devices(devices: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Returns the device of each rank, in turn, where ranks are threads, and may be more than devices."""
    return tuple(islice(cycle(devices), ranks))


def _saved_variables(starter: launch.Launcher) -> dict[str, str]:
    """Asks rank 0 to save the environment variables that the launcher's `end` needs."""
    names = starter.saved_variables
    return {SAVE_VARIABLES: ",".join(names)} if names else {}


def _environment(devices: Sequence[str], machines: Machines) -> dict[str, str]:
    """Returns the environment variables of every rank, under any launcher."""
    env = {
        "OMP_NUM_THREADS": "1",
        "SAMESTEP_TIMEOUT_S": f"{machines.timeout_s:g}",
        "SAMESTEP_DEVICES": ",".join(devices),
    }
    if machines.interface:
        env |= network.check_interface(machines.interface)
    return env


def rank_command(path: Path, rank: LaunchedRank, devices: Sequence[str], machines: Machines) -> Command:
    """Builds the command of one rank that an outer launcher has started; that launcher's variables stay as they are."""
    starter = launch.load(rank.launcher)
    env = _environment(devices, machines) | _saved_variables(starter) | starter.variables.environment()
    # A file is named after the launch: all ranks on this machine derive the same name.
    init_method = rank.init_method or f"file://{private_folder()}/{rank.launcher}-{rank.id}"
    env |= {"SAMESTEP_RUN": rank.id, "SAMESTEP_INIT_METHOD": init_method}
    return Command((sys.executable, *module_arguments("samestep.worker"), str(path)), env)


def private_folder() -> Path:
    """Creates this user's folder for temporary files whose names several processes must know. Raises UserError as
    make_private."""
    return make_private(Path(tempfile.gettempdir()).resolve() / f"samestep-{os.getuid()}")


def shell_line(command: Command) -> str:
    """Returns `command` as one line to paste into a shell."""
    return shlex.join(["env", *(f"{key}={value}" for key, value in command.env.items()), *command.argv])
