"""srun: the launcher of Slurm, inside an allocation (salloc, sbatch). One task is one rank.

Source: https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from samestep.errors import UserError
from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """nproc tasks on each of the allocation's machines; they meet at the first one.

    Raises UserError without a port: the tasks must know it before they start.
    """
    machines = shape.machines
    if not machines.port:
        raise UserError("srun's tasks must know the port where they meet; give --port, or run inside a Slurm job")
    command = (
        "srun",
        f"--nodes={machines.nnodes}",
        f"--ntasks={machines.nnodes * shape.nproc}",
        f"--ntasks-per-node={shape.nproc}",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        sys.executable,
        *program,
    )
    env = {"SAMESTEP_INIT_METHOD": f"tcp://{machines.endpoint}", "SAMESTEP_STARTED_BY": "srun"}
    return Plan(command, env, signal.SIGTERM)  # which it passes on to its tasks
