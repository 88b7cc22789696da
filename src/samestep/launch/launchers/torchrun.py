"""torchrun: python -m torch.distributed.run, the launcher that comes with PyTorch.

`python -m torch.distributed.launch` is its deprecated spelling: it warns, and passes --local-rank as an argument.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from samestep.errors import UserError
from samestep.launch import (
    Command,
    FailureReport,
    Launcher,
    Machines,
    RankEnvironment,
    Shape,
    one_task_on_each,
    tasks_of,
)
from samestep.message import Message, message
from samestep.world import RENDEZVOUS_PORT, RankVariables
from samestep.world.imports import module_arguments

LAST_CALL_S = 10  # for which the machines that are there wait for others, where not all must come
VARIABLES = RankVariables()
REPORT = FailureReport(
    killed=(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: -(?P<number>\d+)",),
    exited=(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>[1-9]\d*)",),
)


def plan(program: Sequence[str], shape: Shape) -> Command:
    """Starts the ranks of this machine, the only one or one of several.

    With a node rank, or on one machine, the rendezvous is static; otherwise it is torch's dynamic one, which numbers
    the machines. Both listen on the master's address only (samestep.rank.rendezvous).
    Where machines may leave and join, each round of it gets a store of its own: torch gives a machine that joins no
    address of an older one. Raises UserError when there are several machines and no port for the rendezvous.
    """
    machines = shape.machines
    wait_s = math.ceil(machines.timeout_s)
    if machines.nnodes > 1 and not machines.port:
        raise UserError("several machines must know the rendezvous port; give the same --port on each")
    elastic = machines.min_nodes > 0
    if machines.nnodes == 1 or machines.node_rank is not None:
        rendezvous = ["--rdzv-backend=samestep", f"--rdzv-conf=rank={machines.node_rank or 0},timeout={wait_s}"]
    else:
        rendezvous = [
            "--rdzv-backend=samestep",
            "--rdzv-id=samestep",
            f"--rdzv-conf=join_timeout={wait_s},read_timeout={wait_s},is_host={str(machines.is_master).lower()}"
            + (f",last_call_timeout={LAST_CALL_S},request={machines.request_digest}" if elastic else ""),
            *([f"--local-addr={machines.local_address}"] if machines.local_address else []),
        ]
    return Command(
        (
            sys.executable,
            *module_arguments("torch.distributed.run"),
            f"--nnodes={machines.min_nodes}:{machines.nnodes}" if elastic else f"--nnodes={machines.nnodes}",
            f"--nproc-per-node={shape.nproc}",
            *rendezvous,
            f"--rdzv-endpoint={machines.endpoint}",
            f"--max-restarts={machines.max_restarts}",
            "--monitor-interval=0.05",
            f"--log-dir={shape.folder}/torchrun",
            "--no-python",
            sys.executable,
            *program,
        ),
        VARIABLES.environment() | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if elastic else {}),
    )


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    if machines.single_launch and machines.nnodes > 1:
        return message("torchrun_starts_on_each_machine")
    return None


def launched_size(env: Mapping[str, str]) -> int | None:
    return int(env.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in env else None


def check_launched(env: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Raises UserError when another launcher has started a torchrun for each of its tasks, each of too few machines."""
    groups = env.get("GROUP_WORLD_SIZE", "1")
    for launcher, tasks in sizes.items():
        if launcher == "torchrun" or tasks == 1 or groups == str(tasks):
            continue
        machines, on_each = tasks_of(launcher, env)
        several = f"--nnodes={machines} --rdzv-backend=c10d --rdzv-endpoint=HOST:{RENDEZVOUS_PORT}" * (machines > 1)
        how, ranks = f"give torchrun {several}", max(on_each, int(env.get("LOCAL_WORLD_SIZE", "1")))
        if on_each > 1:  # two agents on a machine would each give their ranks its first GPUs
            one_each = one_task_on_each(launcher, machines)
            how = f"start one on each machine, {one_each} torchrun --nproc-per-node={ranks} {several}".rstrip()
        raise UserError(
            f"{launcher} started {tasks} tasks and each its own torchrun of {groups} machine{'s' * (groups != '1')}, "
            f"which would train separately; {how}, or let {launcher} start samestep itself"
        )


def identity(env: Mapping[str, str]) -> str:
    name = env.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}"


def init_method(env: Mapping[str, str], host: str, port: int) -> str:
    return "env://"  # torchrun's store


LAUNCHER = Launcher(
    starts=("group",),
    variables=VARIABLES,
    plan=plan,
    missing=missing,
    report=REPORT,
    environment=RankEnvironment("TORCHELASTIC_", launched_size, identity, init_method, check_launched=check_launched),
    options=("max_restarts", "min_nodes"),
)
