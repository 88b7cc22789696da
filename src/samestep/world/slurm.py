"""Reads a Slurm job's first machine, and derives the rendezvous port from its number."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from samestep.errors import UserError

FIRST_PORT, PORTS = 20000, 10000  # those that jobs use
INTERACTIVE_STEP = 2**31  # Slurm gives the steps of salloc's shell and of batch scripts numbers from here on


def port_of(job_id: str, step_id: str = "0") -> int:
    """Returns a port derived from the numbers of a job and its step, so that two on one machine seldom share one."""
    step = int(step_id) if int(step_id) < INTERACTIVE_STEP else 0
    return FIRST_PORT + (int(job_id) + 97 * step) % PORTS


def first_host(env: Mapping[str, str]) -> str:
    """Returns the first machine of the Slurm job in `env`. Raises UserError when scontrol does not answer."""
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return shown.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        raise UserError(
            f"scontrol does not list the machines of {nodes}; set MASTER_ADDR to the first one before srun"
        ) from None
