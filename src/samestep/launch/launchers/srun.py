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
from samestep.launch import Command, FailureReport, Launcher, Machines, RankEnvironment, Scheduler, Shape, tasks_of
from samestep.launch.rendezvous_address import tcp_init_method
from samestep.message import Message, message
from samestep.records.record import ENVIRONMENT
from samestep.world import RankVariables, network, tasks_per_node

VARIABLES = RankVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
TASK = r"srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: "
SIGNALS = {"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7}  # srun's words
REPORT = FailureReport(
    killed=(f"{TASK}(?P<word>{'|'.join(SIGNALS)})",),
    exited=(TASK + r"Exited with exit code (?P<code>\d+)",),
    signals=SIGNALS,
)
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


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    if which("srun") is None:
        return message("launcher_not_installed", launcher="srun", package="Slurm", install=None)
    if "SLURM_JOB_ID" not in env:
        return message("no_slurm_job_here")
    return None


def launched_size(env: Mapping[str, str]) -> int | None:
    """None in salloc's shell and in a batch script, which Slurm runs as steps too."""
    step = env.get("SLURM_STEP_ID", "")
    in_step = step.isdigit() and int(step) < network.INTERACTIVE_STEP
    return int(env.get("SLURM_NTASKS", "1")) if in_step and int(env.get("SLURM_NTASKS", "1")) > 1 else None


def node_rank(env: Mapping[str, str], nnodes: int | None) -> int | None:
    """The number of this machine, where one task runs on each of `nnodes` machines."""
    one_each = env.get("SLURM_NTASKS") == str(nnodes) and "SLURM_STEP_ID" in env
    if one_each and tasks_of("srun", env)[1] > 1:
        return None
    return int(env["SLURM_NODEID"]) if one_each else None


def check_launched(env: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Raises UserError when variables that the user's shell exports contradict the srun that started this task."""
    for variable, of_srun in (
        ("WORLD_SIZE", "SLURM_NTASKS"),
        ("RANK", "SLURM_PROCID"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
    ):
        if variable in env and env[variable] != env[of_srun]:
            raise UserError(
                f"{variable}={env[variable]} contradicts srun's {of_srun}={env[of_srun]}; type `unset RANK WORLD_SIZE "
                "LOCAL_RANK` before srun, which numbers its tasks itself"
            )


def allocated_nodes(env: Mapping[str, str]) -> int | None:
    return int(env["SLURM_JOB_NUM_NODES"]) if "SLURM_JOB_ID" in env else None


def allocated_ranks(env: Mapping[str, str]) -> int | None:
    tasks = env.get("SLURM_TASKS_PER_NODE")
    return tasks_per_node(tasks, 0) if tasks else None


def rendezvous_host(env: Mapping[str, str]) -> str:
    return network.first_slurm_host(env)


def rendezvous_port(env: Mapping[str, str]) -> int:
    return network.slurm_port(env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "0"))


def identity(env: Mapping[str, str]) -> str:
    return ".".join(env[name] for name in SAVED_VARIABLES)


def init_method(env: Mapping[str, str], host: str, port: int) -> str:
    """The job's first machine, unless MASTER_ADDR names another."""
    return tcp_init_method(env.get("MASTER_ADDR") or host, env.get("MASTER_PORT", port))


def end(folder: Path) -> None:
    """Ends the tasks of a step, which are children of Slurm's daemons."""
    saved = folder / ENVIRONMENT
    if saved.exists():
        step = identity(json.loads(saved.read_text()))
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--signal=KILL", step], capture_output=True, timeout=10)


LAUNCHER = Launcher(
    starts=("group",),
    variables=VARIABLES,
    plan=plan,
    missing=missing,
    report=REPORT,
    environment=RankEnvironment(
        "SLURM_",
        launched_size,
        identity,
        init_method,
        rendezvous_host=rendezvous_host,
        rendezvous_port=rendezvous_port,
        check_launched=check_launched,
        node_rank=node_rank,
        one_on_each="--nodes={machines} --ntasks={machines} --ntasks-per-node=1",
        starts_torchrun=True,
    ),
    scheduler=Scheduler("inside salloc or sbatch", allocated_nodes, allocated_ranks),
    end=end,
    saved_variables=SAVED_VARIABLES,
)
