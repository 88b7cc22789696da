"""fork: ranks forked from a process that has imported torch already. For proofs on a CPU; nobody trains so."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """The ranks meet at a file, so that no port can be taken."""
    *head, path = program
    meeting = f"file://{shape.folder}/rendezvous"
    line = (sys.executable, *head, "--fork", str(shape.nproc), path)
    return Plan(line, {"SAMESTEP_INIT_METHOD": meeting}, fork="ranks")
