"""What Python imports: the search path of processes that samestep starts, and which files are the user's.

`python -m MODULE` puts the current folder first on sys.path. A file named socket.py or torch.py there, in a folder that
came from elsewhere, would run in place of the real module. A job's folder is on the path only once the job is loaded.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Python 3.10 has no -P. `-c` puts '' on the path after the start, when nothing but built-in modules has been imported.
RUN_MODULE = (
    "import sys; del sys.path[0], sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_arguments(module: str) -> tuple[str, ...]:
    """Returns the arguments after `python` that run a module as `-m` does, without the current folder on sys.path.

    Every command that starts Python takes them from here. Not by PYTHONSAFEPATH: what the job itself starts would
    inherit it.
    """
    if hasattr(sys.flags, "safe_path"):
        return "-P", "-m", module
    return "-c", RUN_MODULE, module


def hiding_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that were imported in place of modules of Python's standard library."""
    loaded = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(sys.stdlib_module_names)}
    return [Path(file) for name, file in loaded.items() if file and Path(file) in _places(folder, name)]


# Which Python has imported before it looks at the folder of a script.
AT_START = {"_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io", "ntpath", "os"}
AT_START |= {"posixpath", "site", "stat", "zipimport", *sys.builtin_module_names}


def forget_hidden_modules(folder: Path) -> None:
    """Forgets modules of Python's standard library whose names files of a script's folder have: the script imports its
    own, as in a process that has imported nothing before."""
    for name in sys.stdlib_module_names - AT_START:
        if name in sys.modules and any(place.exists() for place in _places(folder, name)):
            del sys.modules[name]


def _places(folder: Path, name: str) -> tuple[Path, Path]:
    """Returns the files of a folder that a module of this name is imported from."""
    return folder / f"{name}.py", folder / name / "__init__.py"


PACKAGE = str(Path(__file__).parents[1])
STANDARD = sysconfig.get_paths()["stdlib"]
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
FREEZER = re.compile(r"^<(frozen|string|__array_function__)")


def is_users_code(file: str) -> bool:
    """Whether it is code of the user: not of Python, of an installed package or of samestep, but for its jobs."""
    of_jobs = file.startswith(f"{PACKAGE}{os.sep}jobs{os.sep}")
    library = file.startswith((PACKAGE, STANDARD)) or INSTALLED.search(file) or FREEZER.match(file)
    return of_jobs or not library


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspends the collection of garbage during the block. While torch is imported it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
