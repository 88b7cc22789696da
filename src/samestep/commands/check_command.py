"""Runs a command that starts Python ranks itself, as torchrun does, so that each rank is recorded."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from samestep.launch import Command, inherit
from samestep.launch.launchers import srun
from samestep.records.script import PLAN


def is_command(words: Sequence[str]) -> bool:
    """Whether the words of the command line are a command, and not a Python script with its arguments."""
    return not words[0].endswith(".py") and shutil.which(words[0]) is not None


def recorded(words: Sequence[str], folder: Path, nproc: int) -> Command:
    """Returns a command whose ranks run the plan in a folder, each with the script that the command gives it."""
    first = folder / "python"
    first.mkdir()
    shutil.copyfile(inherit.__file__, first / "sitecustomize.py")
    path = os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {inherit.PLAN: str(folder / PLAN), inherit.FOLDER: str(first), "PYTHONPATH": path}
    env |= {inherit.RANKS: str(nproc), inherit.STEP: os.environ.get("SLURM_STEP_ID", "none")}
    env |= {inherit.SLURM: ",".join(srun.VARIABLES)}
    return Command(tuple(words), env, signal.SIGTERM)
