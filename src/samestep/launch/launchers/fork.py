"""fork: forks the ranks from a process that has imported torch. For proofs on a CPU only, never for a training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Launcher, Machines, Shape, only_one_machine
from samestep.launch.launchers import torchrun
from samestep.message import Message
from samestep.world import RankVariables


def plan(program: Sequence[str], shape: Shape) -> Command:
    """The rendezvous is a file, so it needs no free port."""
    *head, path = program
    init_method = f"file://{shape.folder}/rendezvous"
    line = (sys.executable, *head, "--fork", str(shape.nproc), path)
    return Command(line, {"SAMESTEP_INIT_METHOD": init_method}, fork="ranks")


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    return only_one_machine("fork", machines)


LAUNCHER = Launcher(
    starts=("group", "one"),
    variables=RankVariables(),
    plan=plan,
    missing=missing,
    report=torchrun.REPORT,  # which worker.py writes
    one_machine=True,
)
