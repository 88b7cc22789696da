"""torchrun: python -m torch.distributed.run, the launcher that comes with PyTorch.

`python -m torch.distributed.launch` is its deprecated spelling: it warns, and passes --local-rank as an argument.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from samestep.errors import UserError
from samestep.launch import Command, Machines, Shape
from samestep.world import RankVariables

STARTS = ("group",)
VARIABLES = RankVariables()
KILLED = (r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: -(?P<number>\d+)",)
EXITED = (r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>\d+)",)


def plan(program: Sequence[str], shape: Shape) -> Command:
    """One machine, or this one's part of several.

    With a node rank (or one machine) the rendezvous is static, and its store listens on the master's address alone
    (samestep.rank.rendezvous); without, it is torch's c10d, which numbers the machines and listens on all of them.
    Raises UserError when several machines have no port to meet at.
    """
    machines = shape.machines
    wait_s = math.ceil(machines.timeout_s)
    if machines.nnodes > 1 and not machines.port:
        raise UserError("several machines must know the port where they meet; give the same --port on each")
    if machines.nnodes == 1 or machines.node_rank is not None:
        meeting = ["--rdzv-backend=samestep", f"--rdzv-conf=rank={machines.node_rank or 0},timeout={wait_s}"]
    else:
        meeting = [
            "--rdzv-backend=c10d",
            "--rdzv-id=samestep",
            f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s},is_host={str(machines.leads).lower()}",
            *([f"--local-addr={machines.own}"] if machines.own else []),
        ]
    return Command(
        (
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={machines.nnodes}",
            f"--nproc-per-node={shape.nproc}",
            *meeting,
            f"--rdzv-endpoint={machines.endpoint}",
            f"--max-restarts={machines.max_restarts}",
            "--monitor-interval=0.05",
            f"--log-dir={shape.folder}/torchrun",
            "--no-python",
            sys.executable,
            *program,
        ),
        VARIABLES.environment(),
    )


def missing(machines: Machines, env: Mapping[str, str]) -> str | None:
    if machines.reached and machines.nnodes > 1:
        return "torchrun must be started on each machine; srun and mpirun reach them all"
    return None


def size_around(env: Mapping[str, str]) -> int | None:
    return int(env.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in env else None


def identity(env: Mapping[str, str]) -> str:
    name = env.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}"


def meeting(env: Mapping[str, str], first_host: str | None, port: int) -> str:
    return ""  # its own store
