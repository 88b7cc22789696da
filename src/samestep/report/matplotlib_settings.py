"""Imports matplotlib without the settings of the current folder.

matplotlib reads a file `matplotlibrc` there before all others. In a folder that came from elsewhere it could have texts
drawn by LaTeX, or be a named pipe, for which the import would wait for ever.
"""

from __future__ import annotations

import os
from importlib import import_module

FILE = "matplotlibrc"


def import_matplotlib() -> None:
    """Imports matplotlib, whose settings are those of this user; from another folder, where the current one has some,
    too."""
    folder = os.open(".", os.O_RDONLY | os.O_CLOEXEC) if os.path.lexists(FILE) else None
    try:
        if folder is not None:
            os.chdir(os.path.dirname(__file__))
        import_module("matplotlib")
    finally:
        if folder is not None:
            os.fchdir(folder)
            os.close(folder)
