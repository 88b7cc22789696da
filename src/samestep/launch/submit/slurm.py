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
from samestep.launch.submit import Training, render


def script(training: Training, out: Path, time: str, options: Sequence[str] = ()) -> str:
    """The script; its results go to `out`. time: the limit, as in '2:00:00'. options: more of sbatch's own."""
    odd = [text for text in (time, *options) if "\n" in text]
    if odd:
        raise UserError(f"{odd[0]!r} is more than one line; give each option of sbatch by itself")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", time):
        raise UserError(f"--time {time}: write minutes, hours:minutes:seconds or days-hours:minutes, as in 2:00:00")
    return render(
        "slurm.sh.j2",
        training=training,
        out=str(out),
        time=time,
        options=options,
        python=shlex.quote(sys.executable),
        quoted_out=shlex.quote(str(out)),
    )


def submit(path: Path) -> str:
    """Hands a script to sbatch; returns the job's number. Raises UserError with what sbatch says."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"sbatch is not installed here; type `sbatch {path}` where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch does not answer; type `sbatch {path}` later") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"sbatch did not take {path}: {said[-1] if said else 'no word'}")
    return done.stdout.strip().partition(";")[0]
