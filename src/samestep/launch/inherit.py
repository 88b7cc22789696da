"""Turns the ranks of a command into workers.

Copied as sitecustomize.py into a folder on PYTHONPATH, it runs first in each Python that the command starts. One that
is a rank, by RANK in its environment or as one of srun's tasks, and runs a script goes on as a worker. It imports only
the standard library.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

# RANKS: how many there are. STEP: the Slurm step of the command itself. SLURM: the names of srun's variables.
RANKS, STEP, SLURM = "SAMESTEP_CHECK_RANKS", "SAMESTEP_CHECK_STEP", "SAMESTEP_CHECK_SLURM"
RANK_VARIABLES = "SAMESTEP_RANK_VARIABLES"
HOROVOD = tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"))
LAUNCHERS = ("torch", "accelerate", "lightning", "deepspeed", "samestep")  # a rank's python -m of these is not training
PLAN, SCRIPT, FOLDER = "SAMESTEP_CHECK_PLAN", "SAMESTEP_CHECK_SCRIPT", "SAMESTEP_CHECK_PYTHONPATH"


def become_worker() -> None:
    """Replaces this process by a worker with the same script, once: what a rank starts itself stays as it is."""
    plan = os.environ.get(PLAN)
    task = is_task(os.environ)
    if not plan or not (task or {"RANK", HOROVOD[0]} & {*os.environ}) or SCRIPT in os.environ:
        return
    words = script_of(sys.orig_argv[1:])
    if words and importlib.util.find_spec("samestep"):
        os.environ[SCRIPT] = json.dumps(words)
        if "RANK" not in os.environ:
            os.environ[RANK_VARIABLES] = os.environ[SLURM] if task else ",".join(HOROVOD)
        os.execv(sys.executable, [sys.executable, "-m", "samestep.worker", plan])


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this is one of as many tasks as there are ranks, which the command started with srun. A torchrun that
    srun starts is one of fewer."""
    step = environment.get("SLURM_STEP_ID", "")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return bool(step) and step != environment.get(STEP) and tasks == environment.get(RANKS)


def script_of(arguments: list[str]) -> list[str]:
    """Returns a script and its arguments, or '-m', a module and its arguments, of what follows 'python'."""
    while arguments and arguments[0].startswith("-"):
        if arguments[0] == "-m" and arguments[1:]:
            return [] if arguments[1].split(".")[0] in LAUNCHERS else arguments
        if arguments[0] in ("-c", "-"):
            return []
        arguments = arguments[2 if arguments[0] in ("-W", "-X") else 1 :]
    return arguments


def import_next() -> None:
    """Imports the sitecustomize that this one hides."""
    others = [path for path in sys.path if path != os.environ.get(FOLDER)]
    found = PathFinder.find_spec("sitecustomize", others)
    if found and found.loader:
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)


if __name__ == "sitecustomize":
    become_worker()
    import_next()
