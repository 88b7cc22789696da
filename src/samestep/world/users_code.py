"""Which files are code of the user, in the stack of a process or the traceback of an error."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
STANDARD = sysconfig.get_paths()["stdlib"]
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
FREEZER = re.compile(r"^<(frozen|string|__array_function__)")


def is_users_code(file: str) -> bool:
    """Whether it is code of the user: not of Python, of an installed package or of samestep, but for its jobs."""
    of_jobs = file.startswith(f"{PACKAGE}{os.sep}jobs{os.sep}")
    library = file.startswith((PACKAGE, STANDARD)) or INSTALLED.search(file) or FREEZER.match(file)
    return of_jobs or not library
