"""The command `samestep` as tests type it, and the jobs that they give it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
JOBS = TESTS / "launch" / "jobs.py"
WATCHED = TESTS / "jobs" / "watched.py"
DRAWN = f"{TESTS}/conformance/jobs_drawn.py:job"


def samestep(*arguments: str, out: Path | None = None, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """What a command has come to, in a wide terminal."""
    place = ["--out", str(out)] if out else []
    command = [sys.executable, "-m", "samestep", *arguments, *place]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | {"COLUMNS": "200"})
