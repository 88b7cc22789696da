"""srun: the launcher of Slurm, inside an allocation (salloc, sbatch). One task is one rank.

Source: https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which

from samestep.errors import UserError
from samestep.launch import Command, Machines, Shape
from samestep.launch.init_method import tcp_init_method
from samestep.records.record import ENVIRONMENT
from samestep.world import RankVariables
from samestep.world.slurm import INTERACTIVE_STEP

STARTS = ("group",)
VARIABLES = RankVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
REPORT = r"srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: "
KILLED = (REPORT + "(?P<word>Killed|Out Of Memory|Segmentation fault|Aborted|Bus error)",)
EXITED = (REPORT + r"Exited with exit code (?P<code>\d+)",)
SAVED_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def plan(program: Sequence[str], shape: Shape) -> Command:
    """Starts nproc tasks on each of the allocation's machines; the rendezvous is on the first one.

    Raises UserError without a port: the tasks must know it before they start.
    """
    machines = shape.machines
    if not machines.port:
        raise UserError("srun's tasks must know the rendezvous port; give --port, or run inside a Slurm job")
    command = (
        "srun",
        f"--nodes={machines.nnodes}",
        f"--ntasks={machines.nnodes * shape.nproc}",
        f"--ntasks-per-node={shape.nproc}",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        sys.executable,
        *program,
    )
    env = {"SAMESTEP_INIT_METHOD": f"tcp://{machines.endpoint}"} | VARIABLES.environment()
    return Command(command, env, signal.SIGTERM)  # srun forwards it to its tasks


def missing(machines: Machines, env: Mapping[str, str]) -> str | None:
    if which("srun") is None:
        return "srun is not installed; it comes with Slurm"
    if "SLURM_JOB_ID" not in env:
        return "no Slurm job here; run inside salloc or sbatch, or write a batch script with samestep slurm"
    return None


def launched_size(env: Mapping[str, str]) -> int | None:
    """None in salloc's shell and in a batch script, which Slurm runs as steps too."""
    step = env.get("SLURM_STEP_ID", "")
    in_step = step.isdigit() and int(step) < INTERACTIVE_STEP
    return int(env.get("SLURM_NTASKS", "1")) if in_step and int(env.get("SLURM_NTASKS", "1")) > 1 else None


def identity(env: Mapping[str, str]) -> str:
    return ".".join(env[name] for name in SAVED_VARIABLES)


def init_method(env: Mapping[str, str], first_host: str | None, port: int) -> str:
    """The job's first machine, unless MASTER_ADDR names another."""
    return tcp_init_method(env.get("MASTER_ADDR") or str(first_host), env.get("MASTER_PORT", port))


def end(folder: Path) -> None:
    """Ends the tasks of a step, which are children of Slurm's daemons."""
    saved = folder / ENVIRONMENT
    if saved.exists():
        step = identity(json.loads(saved.read_text()))
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, timeout=10)
