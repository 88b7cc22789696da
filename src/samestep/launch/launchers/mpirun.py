"""mpirun: the launcher of Open MPI. It only starts the ranks; the training communicates with gloo or NCCL, not MPI.

Source: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from shutil import which

from samestep.errors import UserError
from samestep.launch import Command, FailureReport, Launcher, Machines, RankEnvironment, Shape
from samestep.launch.rendezvous_address import user_init_method
from samestep.message import Message, message
from samestep.world import RENDEZVOUS_PORT, RankVariables

VARIABLES = RankVariables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_NODE_RANK",
)
REPORT = FailureReport(
    killed=(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<number>\d+)",),
    exited=(r"Process name: \[\[.*\],(?P<rank>\d+)\]\s+Exit code: +(?P<code>[1-9]\d*)",),
)


def plan(program: Sequence[str], shape: Shape) -> Command:
    """Starts nproc ranks on this machine, or on each of `machines.hosts`, which mpirun reaches by ssh.

    Raises UserError when there are several machines and no port for the rendezvous.
    """
    machines = shape.machines
    hosts = machines.hosts or ("localhost",)
    if machines.nnodes != len(hosts):
        raise UserError(f"mpirun needs the machines' names: give {machines.nnodes} with --hosts h1,h2")
    if len(hosts) > 1 and not machines.port:
        raise UserError("several machines must know the rendezvous port; give one with --port")
    init_method = f"tcp://{machines.endpoint}" if machines.port else f"file://{shape.folder}/rendezvous"
    env = {"SAMESTEP_INIT_METHOD": init_method} | VARIABLES.environment()
    exported = [*env, "SAMESTEP_TIMEOUT_S", "SAMESTEP_DEVICES", "OMP_NUM_THREADS", *machines.exported]
    if machines.interface:
        exported += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    env |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # the user runs this command as root already
    command = (
        "mpirun",
        "-np",
        str(len(hosts) * shape.nproc),
        "--host",
        ",".join(f"{host}:{shape.nproc}" for host in hosts),
        "--map-by",
        f"ppr:{shape.nproc}:node",
        "--bind-to",
        "none",
        *(part for name in exported for part in ("-x", name)),
        sys.executable,
        *program,
    )
    return Command(command, env)


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    if which("mpirun"):
        return None
    install = "apt install openmpi-bin"
    return message("launcher_not_installed", launcher="mpirun", package="Open MPI", install=install)


def launched_size(env: Mapping[str, str]) -> int | None:
    return int(env[VARIABLES.size]) if VARIABLES.rank in env else None


def identity(env: Mapping[str, str]) -> str:
    return env.get("PMIX_NAMESPACE") or "0"


def init_method(env: Mapping[str, str], host: str, port: int) -> str:
    """Raises UserError where the ranks are on several machines and MASTER_ADDR is not set."""
    return user_init_method("mpirun", env, VARIABLES, f"mpirun -x MASTER_ADDR=h1 -x MASTER_PORT={RENDEZVOUS_PORT} …")


LAUNCHER = Launcher(
    starts=("group",),
    variables=VARIABLES,
    plan=plan,
    missing=missing,
    report=REPORT,
    environment=RankEnvironment(
        "OMPI_",
        launched_size,
        identity,
        init_method,
        one_on_each="-np {machines} --map-by ppr:1:node",
        starts_torchrun=True,
    ),
    options=("hosts",),
)
