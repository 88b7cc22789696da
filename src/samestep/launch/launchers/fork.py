"""fork: ranks forked from a process that has imported torch already. For proofs on a CPU; nobody trains so."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Machines, Shape
from samestep.world import RankVariables

STARTS = ("group", "one")
VARIABLES = RankVariables()
# worker.py reports as torchrun does.
KILLED = (r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: -(?P<number>\d+)",)
EXITED = (r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>\d+)",)


def plan(program: Sequence[str], shape: Shape) -> Command:
    """The ranks meet at a file, so that no port can be taken."""
    *head, path = program
    meeting = f"file://{shape.folder}/rendezvous"
    line = (sys.executable, *head, "--fork", str(shape.nproc), path)
    return Command(line, {"SAMESTEP_INIT_METHOD": meeting}, fork="ranks")


def missing(machines: Machines, env: Mapping[str, str]) -> str | None:
    if machines.nnodes > 1:
        return f"fork starts ranks on one machine; for {machines.nnodes} use torchrun, srun or mpirun"
    return None
