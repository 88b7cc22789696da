"""Runs a command that starts Python ranks itself, as torchrun does, so that each rank is recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep import launch
from samestep.launch import Command
from samestep.records.script import PLAN
from samestep.world import RankVariables, become_worker


def is_command(words: Sequence[str]) -> bool:
    """Whether the words of the command line are a command, and not a Python script with its arguments."""
    return not words[0].endswith(".py") and shutil.which(words[0]) is not None


def recorded(words: Sequence[str], folder: Path, nproc: int) -> Command:
    """Returns a command whose ranks run the plan in a folder, each with the script that the command gives it."""
    first = folder / "python"
    first.mkdir()
    shutil.copyfile(become_worker.__file__, first / "sitecustomize.py")
    path = os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {become_worker.PLAN: str(folder / PLAN), become_worker.FOLDER: str(first), "PYTHONPATH": path}
    env |= {become_worker.LAUNCHERS: json.dumps(_launchers(os.environ, nproc))}
    return Command(tuple(words), env, signal.SIGTERM, launchers=tuple(launch.names()))  # which one it is, is not known


def _launchers(env: Mapping[str, str], nproc: int) -> list[tuple[RankVariables, dict[str, str | None], int]]:
    """Returns the value of become_worker.LAUNCHERS. Fewer processes than ranks may be torchruns."""
    launchers: dict[RankVariables, tuple[RankVariables, dict[str, str | None], int]] = {}
    for launcher in launch.all_launchers().values():  # several use torchrun's variables
        inherited = {name: env.get(name) for name in (*launcher.variables, *launcher.saved_variables)}
        starts_torchrun = launcher.environment is not None and launcher.environment.starts_torchrun
        launchers.setdefault(launcher.variables, (launcher.variables, inherited, nproc if starts_torchrun else 1))
    return [*launchers.values()]
