"""spawn: torch.multiprocessing.spawn, which starts the ranks from Python. For notebooks and single scripts.

Source: https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Launcher, Machines, Shape, only_one_machine
from samestep.launch.launchers import torchrun
from samestep.message import Message
from samestep.world import RankVariables


def plan(program: Sequence[str], shape: Shape) -> Command:
    """The rendezvous is a file, so it needs no free port; with --port it is tcp://."""
    *head, path = program
    machines = shape.machines
    init_method = f"tcp://{machines.endpoint}" if machines.port else f"file://{shape.folder}/rendezvous"
    return Command((sys.executable, *head, "--spawn", str(shape.nproc), path), {"SAMESTEP_INIT_METHOD": init_method})


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    return only_one_machine("spawn", machines)


LAUNCHER = Launcher(
    starts=("group",),
    variables=RankVariables(),
    plan=plan,
    missing=missing,
    report=torchrun.REPORT,  # which worker.py writes
    one_machine=True,
)
