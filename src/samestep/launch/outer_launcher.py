"""Detects the launcher (torchrun, srun, …) that has started this command as one rank of several. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep import launch
from samestep.errors import UserError
from samestep.message import message
from samestep.world import RankVariables, places
from samestep.world.processes import COMMAND

NODE_RANK = "NODE_RANK"  # environment variable: the number of this machine, of Lightning and of schedulers


@dataclass(frozen=True)
class LaunchedRank:
    """This command, as rank `rank` of the `size` that `launcher` has started.

    id: names the launch. init_method: of torch.distributed; empty: a file on this machine.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    id: str
    init_method: str = ""


def outer_launcher(env: Mapping[str, str]) -> str | None:
    """Returns the launcher that has started this process as one of several ranks; None where none has.

    Raises UserError, with the line to type, when the launchers' variables contradict each other.
    """
    if COMMAND in env:
        return None  # samestep itself started this process
    by_hand = [name for name in RankVariables()[:3] if name in env]
    ranks = [launcher.variables.rank for launcher in launch.all_launchers().values()]
    _check_numbers(env, [*RankVariables(), *ranks, "MASTER_PORT", NODE_RANK])
    sizes = _launched_sizes(env)
    for launcher, size in sizes.items():
        launch.environments()[launcher].check_launched(env, sizes)
        return launcher if size > 1 else None
    _check_node_rank(env)
    if by_hand and int(env.get("WORLD_SIZE", "1")) > 1:
        absent = [
            name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env
        ]
        if absent:
            raise UserError(
                f"the environment says WORLD_SIZE={env['WORLD_SIZE']} but has no {' and no '.join(absent)}; set "
                f"{'it' if len(absent) == 1 else 'them'} in each process, or `unset {' '.join(by_hand)}` to let "
                "samestep start the ranks"
            )
        if int(env["RANK"]) >= int(env["WORLD_SIZE"]):
            raise UserError(
                f"RANK={env['RANK']} is not below WORLD_SIZE={env['WORLD_SIZE']}; ranks count from 0, so set "
                f"RANK=0 to RANK={int(env['WORLD_SIZE']) - 1}"
            )
        return launch.DEFAULT
    return None


def _check_node_rank(env: Mapping[str, str]) -> None:
    """Raises UserError where the ranks are numbered by their machine and their number on it, as Lightning does.

    How many ranks each machine has is in no variable; a command on the second machine would train alone."""
    if NODE_RANK not in env or "RANK" in env:
        return
    size, local_rank = int(env.get("WORLD_SIZE", "1")), env.get("LOCAL_RANK")
    if env[NODE_RANK] == "0" and size == 1 and local_rank in (None, "0"):
        return
    stale = [name for name in (*RankVariables()[:3], NODE_RANK) if name in env]
    raise UserError(
        message("ranks_are_numbered_by_machine", node=env[NODE_RANK], local=local_rank, unset=" ".join(stale))
    )


def _launched_sizes(env: Mapping[str, str]) -> dict[str, int]:
    """Returns launcher -> number of ranks; the innermost launcher first, because torchrun runs inside of others."""
    _check_numbers(env, [launcher.variables.size for launcher in launch.all_launchers().values()])
    sizes = {name: environment.launched_size(env) for name, environment in launch.environments().items()}
    return {name: size for name, size in sizes.items() if size is not None}


def refuse_to_start_more(env: Mapping[str, str], nnodes: int | None) -> None:
    """Raises UserError when a launcher has started several of these commands, and each would start ranks itself.

    nnodes: machines, where the command runs once on each; a launcher may have started it there."""
    if COMMAND in env:
        return
    with_node_rank = {name for name, environment in launch.environments().items() if environment.node_rank}
    for launcher, size in _launched_sizes(env).items():
        if size == 1:
            continue
        machines, on_each = launch.tasks_of(launcher, env)
        if launcher in with_node_rank and size == nnodes and on_each == 1:
            continue
        once = ""
        if launcher in with_node_rank and machines > 1:
            first = f" with {launch.one_task_on_each(launcher, machines)} and" if on_each > 1 else ""
            once = f", or start it once on each machine,{first} with --nnodes {machines}"
        raise UserError(
            f"{launcher} has started this command as {size} ranks; with --nproc, --nnodes or --launcher each would "
            f"start more ranks; leave these out, or run it without {launcher}{once}"
        )


def _check_numbers(env: Mapping[str, str], names: list[str]) -> None:
    for name in names:
        if name in env and not env[name].isdigit():
            raise UserError(
                f"the environment says {name}={env[name]!r}, which is not a number; correct it, or unset it"
            )


def launched_rank(env: Mapping[str, str], launcher: str, host: str = "", port: int = 0) -> LaunchedRank:
    """Returns this process's rank under an outer launcher.

    host, port: of the rendezvous, where MASTER_ADDR and MASTER_PORT are not set; see launch.RankEnvironment.
    """
    environment = launch.environments()[launcher]
    rank, size, local_rank, local_size, _ = places({**env, **launch.load(launcher).variables.environment()})
    return LaunchedRank(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        id=environment.identity(env),
        init_method=environment.init_method(env, host, port),
    )
