"""mpirun: the launcher of Open MPI. It only starts the ranks; the training speaks gloo or NCCL, not MPI.

Source: https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.errors import UserError
from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    """nproc ranks on this machine, or on each of `machines.hosts`; mpirun reaches those as it does anything: by ssh.

    Raises UserError when several machines have no port to meet at.
    """
    machines = shape.machines
    hosts = machines.hosts or ("localhost",)
    if machines.nnodes != len(hosts):
        raise UserError(f"mpirun starts on machines that it is told: give {machines.nnodes} with --hosts h1,h2")
    if len(hosts) > 1 and not machines.port:
        raise UserError("several machines must know the port where they meet; give one with --port")
    meeting = f"tcp://{machines.endpoint}" if machines.port else f"file://{shape.folder}/rendezvous"
    env = {"SAMESTEP_INIT_METHOD": meeting, "SAMESTEP_STARTED_BY": "mpirun"}
    exported = [*env, "SAMESTEP_TIMEOUT_S", "SAMESTEP_DEVICES", "OMP_NUM_THREADS"]
    if machines.interface:
        exported += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # root has started us already
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
    return Plan(command, env)
