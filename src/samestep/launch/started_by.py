"""Detects an outer launcher: torchrun, srun, … that has started this command as one rank of several. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep import launch
from samestep.errors import UserError
from samestep.world import RankVariables, places
from samestep.world.orphans import COMMAND


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
    _check_numbers(env, [*by_hand, "SLURM_PROCID", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
    sizes = _launched_sizes(env)
    if "torchrun" in sizes:
        _check_torchrun_in_srun(env, "srun" in sizes)
    for launcher, size in sizes.items():
        if launcher == "srun":
            _check_by_hand(env)
        return launcher if size > 1 else None
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
        return "torchrun"
    return None


def _launched_sizes(env: Mapping[str, str]) -> dict[str, int]:
    """Returns launcher -> number of ranks; the innermost launcher first, because torchrun runs inside of others."""
    _check_numbers(env, ["SLURM_NTASKS", *(launch.load(name).VARIABLES.size for name in launch.names())])
    sizes = {}
    for name in launch.names():
        launched_size = getattr(launch.load(name), "launched_size", None)
        size = launched_size(env) if launched_size else None
        if size is not None:
            sizes[name] = size
    return sizes


def refuse_to_start_more(env: Mapping[str, str], nnodes: int | None) -> None:
    """Raises UserError when a launcher has started several of these commands, and each would start ranks itself.

    nnodes: machines, where the command runs once on each; srun may have started it there."""
    if COMMAND in env:
        return
    for launcher, size in _launched_sizes(env).items():
        if launcher == "srun" and size == nnodes:
            continue
        if size > 1:
            raise UserError(
                f"{launcher} has started {size} of these commands, and --nproc, --nnodes or --launcher would have each "
                f"start ranks of its own; leave these out, and each becomes one rank, or type it without {launcher}"
                + (f", or with --nnodes {size} to start it once on each machine" if launcher == "srun" else "")
            )


def _check_numbers(env: Mapping[str, str], names: list[str]) -> None:
    for name in names:
        if name in env and not env[name].isdigit():
            raise UserError(
                f"the environment says {name}={env[name]!r}, which is not a number; correct it, or unset it"
            )


def _check_by_hand(env: Mapping[str, str]) -> None:
    """Raises UserError when variables that the user's shell exports contradict the srun that started this task."""
    for mine, theirs in (("WORLD_SIZE", "SLURM_NTASKS"), ("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if mine in env and env[mine] != env[theirs]:
            raise UserError(
                f"{mine}={env[mine]} contradicts srun's {theirs}={env[theirs]}; type `unset RANK WORLD_SIZE "
                "LOCAL_RANK` before srun, which numbers its tasks itself"
            )


def _check_torchrun_in_srun(env: Mapping[str, str], in_step: bool) -> None:
    groups, tasks = env.get("GROUP_WORLD_SIZE", "1"), env.get("SLURM_NTASKS", "1")
    if in_step and groups != tasks:
        raise UserError(
            f"srun started {tasks} tasks and each its own torchrun of {groups} machine{'s' * (groups != '1')}, which "
            f"would train separately; give torchrun --nnodes={tasks} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500, "
            "or let srun start samestep itself"
        )


def launched_rank(env: Mapping[str, str], first_host: str | None, port: int) -> LaunchedRank | None:
    """Returns this process's rank under an outer launcher; None where there is no such launcher.

    first_host: the first machine of a Slurm job. port: for the rendezvous, where MASTER_PORT is not set.
    """
    launcher = outer_launcher(env)
    if launcher is None:
        return None
    module: Any = launch.load(launcher)
    rank, size, local_rank, local_size, _ = places({**env, **module.VARIABLES.environment()})
    init_method = module.init_method(env, first_host, port)
    return LaunchedRank(launcher, rank, size, local_rank, local_size, module.identity(env), init_method)
