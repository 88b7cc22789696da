"""What a Slurm job tells of its machines."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from samestep.errors import UserError


def first_host(env: Mapping[str, str]) -> str:
    """The first machine of the job that `env` tells of. Raises UserError when Slurm does not answer."""
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        return shown.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        raise UserError(
            f"scontrol does not tell the machines of {nodes}; set MASTER_ADDR to the first one before srun"
        ) from None
