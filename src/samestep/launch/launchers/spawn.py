"""spawn: torch.multiprocessing.spawn, ranks started by a Python function. What notebooks and single scripts use.

Source: https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """The ranks meet at a file, so that no port can be taken; with a port, at tcp://."""
    *head, path = program
    machines = shape.machines
    meeting = f"tcp://{machines.endpoint}" if machines.port else f"file://{shape.folder}/rendezvous"
    return Plan((sys.executable, *head, "--spawn", str(shape.nproc), path), {"SAMESTEP_INIT_METHOD": meeting})
