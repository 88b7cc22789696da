"""The batch script of a training under Slurm.

Source: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError
from samestep.launch.submit import Training, check_line, render
from samestep.world.imports import module_arguments
from samestep.world.network import SLURM_FIRST_PORT, SLURM_PORTS


def script(training: Training, out: Path, time: str, options: Sequence[str] = ()) -> str:
    """Returns the script, with the results in `out`. time: the limit, as in '2:00:00'. options: more of sbatch's.

    Raises UserError for a value that is more than one line, or no limit.
    """
    check_line("--out", str(out))
    for option in options:
        check_line("--sbatch", option)
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", time):
        raise UserError(f"--time {time!r}: write minutes, hours:minutes:seconds or days-hours:minutes, as in 2:00:00")
    return render(
        "slurm.sh.j2",
        training=training,
        log=f"{out}/slurm-".replace("%", "%%") + "%j.out",  # sbatch replaces %j and the like, also in the folder
        time=time,
        options=options,
        samestep=shlex.join([sys.executable, *module_arguments("samestep")]),
        quoted_out=shlex.quote(str(out)),
        first_port=SLURM_FIRST_PORT,
        ports=SLURM_PORTS,
    )


def submit(path: Path) -> str:
    """Submits a script with sbatch, and returns the job's number. Raises UserError with sbatch's error."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"sbatch is not installed here; type `sbatch {path}` where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch does not answer; type `sbatch {path}` later") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"sbatch rejected {path}: {lines[-1] if lines else 'it printed no reason'}")
    return done.stdout.strip().partition(";")[0]
