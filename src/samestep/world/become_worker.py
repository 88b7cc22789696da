"""Turns the ranks of a user's command into workers, or has them monitored.

`samestep check -- COMMAND` and `samestep monitor -- COMMAND` copy this file as sitecustomize.py into a folder on
PYTHONPATH, so that it runs first in each Python that the command starts. For check, one that a launcher has started as
a rank, and that runs a script, goes on as a worker. For monitor, each goes on as it is, and is monitored once it has
imported torch. The copy runs in the user's Python, before the script's folder is on its path: a module of the script's
may have the name of one of the standard library's. So it imports little, and forgets what it had to import.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType
    from typing import Any

# Environment variables. FOLDER: the copy's. SCRIPT: set in a worker; the words after `python`, as JSON.
PLAN, FOLDER, SCRIPT = "SAMESTEP_CHECK_PLAN", "SAMESTEP_CHECK_PYTHONPATH", "SAMESTEP_CHECK_SCRIPT"
MONITOR = "SAMESTEP_MONITOR"  # the folder in which monitored ranks write
REGULAR_FILES = "samestep.world.regular_files"
AS_CPU = "SAMESTEP_AS_CPU"  # set: CPUs compute what the monitored ranks compute on GPUs
AS_CPU_MODULE = "samestep.as_cpu"
MONITORED_RANK = "samestep.recorder.monitored_rank"  # by name, as samestep.worker: both are the child's
# The launchers whose ranks these may be, as JSON: [the names of their rank variables, the values of these and of others
# in the command's own environment, the fewest ranks], the innermost launcher first.
LAUNCHERS = "SAMESTEP_CHECK_LAUNCHERS"
RANK_VARIABLES = "SAMESTEP_RANK_VARIABLES"  # as in samestep.world
# A rank's `python -m` of these is not training: it starts ranks, which train.
NOT_TRAINING = ("torch", "accelerate", "lightning", "deepspeed", "samestep")


def become_worker() -> None:
    """Replaces this process by a worker with the same script, once: what a rank starts itself stays as it is."""
    if PLAN not in os.environ or SCRIPT in os.environ:
        return
    import json

    names, words = rank_variables(os.environ), script_of(sys.orig_argv[1:])
    if names and words and found("samestep"):
        os.environ |= {SCRIPT: json.dumps(words), RANK_VARIABLES: ",".join(names)}
        from samestep.world.imports import module_arguments  # of the samestep that runs the worker

        os.execv(sys.executable, [sys.executable, *module_arguments("samestep.worker"), os.environ[PLAN]])


def install(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Copies this file below a folder. Returns the variables by which each Python of a command runs it first."""
    import shutil

    from samestep.world.regular_files import make_folder, open_new

    first = make_folder(folder / "python")
    with open(__file__, "rb") as source, open_new(first / "sitecustomize.py") as copy:
        shutil.copyfileobj(source, copy)
    path = os.pathsep.join([str(first), *filter(None, [environment.get("PYTHONPATH")])])
    return {FOLDER: str(first), "PYTHONPATH": path}


class AfterTorch:
    """Attaches the monitor to this process once it has imported torch. A finder, the first on sys.meta_path."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds torch as the other finders do, and has it followed by the monitor."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = found(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_attach(module: ModuleType) -> None:
                execute(module)
                attach_monitor()

            spec.loader.exec_module = execute_and_attach  # type: ignore[method-assign]
        return spec


def attach_monitor() -> None:
    """Attaches the monitor. The training goes on as it is where that fails, as with another version of torch."""
    try:
        import importlib
        from pathlib import Path

        folder = Path(os.environ[MONITOR])
        if AS_CPU in os.environ:
            importlib.import_module(AS_CPU_MODULE).attach()
        importlib.import_module(MONITORED_RANK).attach(folder)
        importlib.import_module(REGULAR_FILES).open_new(folder / f"monitored-{os.getpid()}").close()
    except Exception as error:
        print(f"samestep monitor: this process is not monitored ({type(error).__name__}: {error})", file=sys.stderr)


def rank_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables by which this process is a rank; [] where it is none.

    Variables that are as in the command's environment were inherited from it. A launcher that has started fewer
    processes than there are ranks has started other launchers.
    """
    import json

    for names, inherited, fewest in json.loads(environment[LAUNCHERS]):
        rank, size = environment.get(names[0]), environment.get(names[1], "1")
        started = any(environment.get(name) != value for name, value in inherited.items())
        if rank is not None and started and size.isdigit() and int(size) >= fewest:
            return [*names]
    return []


def script_of(arguments: list[str]) -> list[str]:
    """Returns a script and its arguments, or '-m', a module and its arguments, of what follows 'python'."""
    while arguments and arguments[0].startswith("-"):
        if arguments[0] == "-m" and arguments[1:]:
            return [] if arguments[1].split(".")[0] in NOT_TRAINING else arguments
        if arguments[0] in ("-c", "-"):
            return []
        arguments = arguments[2 if arguments[0] in ("-W", "-X") else 1 :]
    return arguments


def found(name: str) -> ModuleSpec | None:
    """Returns where a module is, as importlib.util.find_spec does, which imports others."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec), None)


def import_next() -> None:
    """Imports the sitecustomize that this one hides."""
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    remaining = [path for path in sys.path if path != os.environ.get(FOLDER)]
    hidden = PathFinder.find_spec("sitecustomize", remaining)
    if hidden and hidden.loader:
        module = module_from_spec(hidden)
        hidden.loader.exec_module(module)


if __name__ == "sitecustomize":
    imported = {*sys.modules}
    become_worker()
    if MONITOR in os.environ and found("samestep") and "samestep.worker" not in sys.orig_argv:
        sys.meta_path.insert(0, AfterTorch())
    for name in {*sys.modules} - imported:
        del sys.modules[name]
    import_next()
