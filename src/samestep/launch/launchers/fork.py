"""fork: forks the ranks from a process that has imported torch. For proofs on a CPU only, never for a training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Machines, Shape, only_one_machine
from samestep.launch.launchers import torchrun
from samestep.world import RankVariables

ONE_MACHINE = True
STARTS = ("group", "one")
VARIABLES = RankVariables()
KILLED, EXITED = torchrun.KILLED, torchrun.EXITED  # worker.py writes torchrun's report


def plan(program: Sequence[str], shape: Shape) -> Command:
    """The rendezvous is a file, so it needs no free port."""
    *head, path = program
    init_method = f"file://{shape.folder}/rendezvous"
    line = (sys.executable, *head, "--fork", str(shape.nproc), path)
    return Command(line, {"SAMESTEP_INIT_METHOD": init_method}, fork="ranks")


def missing(machines: Machines, env: Mapping[str, str]) -> str | None:
    return only_one_machine("fork", machines)
