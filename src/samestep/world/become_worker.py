"""Turns the ranks of a user's command into workers.

`samestep check -- COMMAND` copies this file as sitecustomize.py into a folder on PYTHONPATH, so that it runs first in
each Python that the command starts. One that a launcher has started as a rank, and that runs a script, goes on as a
worker. The copy runs in the user's Python: until it starts the worker, it imports
only the standard library.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

# Environment variables. FOLDER: the copy's. SCRIPT: set in a worker; the words after `python`, as JSON.
PLAN, FOLDER, SCRIPT = "SAMESTEP_CHECK_PLAN", "SAMESTEP_CHECK_PYTHONPATH", "SAMESTEP_CHECK_SCRIPT"
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
    names, words = rank_variables(os.environ), script_of(sys.orig_argv[1:])
    if names and words and importlib.util.find_spec("samestep"):
        os.environ |= {SCRIPT: json.dumps(words), RANK_VARIABLES: ",".join(names)}
        from samestep.world.imports import module_arguments  # of the samestep that runs the worker

        os.execv(sys.executable, [sys.executable, *module_arguments("samestep.worker"), os.environ[PLAN]])


def rank_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables by which this process is a rank; [] where it is none.

    Variables that are as in the command's environment were inherited from it. A launcher that has started fewer
    processes than there are ranks has started other launchers.
    """
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


def import_next() -> None:
    """Imports the sitecustomize that this one hides."""
    remaining = [path for path in sys.path if path != os.environ.get(FOLDER)]
    hidden = PathFinder.find_spec("sitecustomize", remaining)
    if hidden and hidden.loader:
        module = importlib.util.module_from_spec(hidden)
        hidden.loader.exec_module(module)


if __name__ == "sitecustomize":
    become_worker()
    import_next()
