"""Whether somebody's launcher has started this command already: torchrun, srun, mpirun or horovodrun. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError
from samestep.world import LAUNCHERS, STARTED_BY, places
from samestep.world.orphans import COMMAND

INTERACTIVE_STEP = 2**31  # Slurm numbers the steps of salloc's shell and of batch scripts from here


@dataclass(frozen=True)
class Started:
    """This command is rank `rank` of `size` that `launcher` has started; `id` names that start.

    meeting: where the ranks meet; empty: in torchrun's own store.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    id: str
    meeting: str = ""


def launcher_around(env: Mapping[str, str]) -> str | None:
    """The launcher that has started this process as one of several ranks; None when it is alone.

    Raises UserError, with the line to type, when what the launchers have set contradicts itself.
    """
    if COMMAND in env:
        return None  # ours has
    in_step = _in_step(env) and int(env.get("SLURM_NTASKS", "1")) > 1
    by_hand = [name for name in LAUNCHERS["torchrun"][:3] if name in env]
    numbers = ["SLURM_NTASKS", "SLURM_PROCID", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    _check_numbers(env, [*by_hand, *numbers])
    if "TORCHELASTIC_RUN_ID" in env:
        _check_torchrun_in_srun(env, in_step)
        return "torchrun" if int(env.get("WORLD_SIZE", "1")) > 1 else None
    for launcher in ("horovodrun", "mpirun"):
        if LAUNCHERS[launcher][0] in env:
            return launcher if int(env[LAUNCHERS[launcher][1]]) > 1 else None
    if in_step:
        _check_by_hand(env)
        return "srun"
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


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process, rather than salloc's shell or a batch script."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < INTERACTIVE_STEP


def refuse_to_start_more(env: Mapping[str, str], nnodes: int | None) -> None:
    """Raises UserError when this process is certainly one of several that a launcher has started, and each would start
    ranks of its own. nnodes: machines, where this command is typed once on each; srun may be what types it."""
    if COMMAND in env:
        return
    _check_numbers(env, ["WORLD_SIZE", "SLURM_NTASKS", *(LAUNCHERS[name][1] for name in ("mpirun", "horovodrun"))])
    tasks = int(env.get("SLURM_NTASKS", "1"))
    sizes = {"torchrun": int(env.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in env else 1}
    sizes |= {name: int(env.get(LAUNCHERS[name][1], "1")) for name in ("mpirun", "horovodrun")}
    if _in_step(env) and nnodes != tasks:
        sizes["srun"] = tasks
    for launcher, size in sizes.items():
        if size > 1:
            raise UserError(
                f"{launcher} has started {size} of these commands, and --nproc, --nnodes or --launcher would have each "
                f"start ranks of its own; leave these out, and each becomes one rank, or type it without {launcher}"
                + (f", or with --nnodes {size} to start it once on each machine" if launcher == "srun" else "")
            )


def _check_numbers(env: Mapping[str, str], names: list[str]) -> None:
    for name in names:
        if name in env and not env[name].isdigit():
            raise UserError(f"the environment says {name}={env[name]!r}, which is no number; set it right, or unset it")


def _check_by_hand(env: Mapping[str, str]) -> None:
    """What the user's shell or script exports must agree with the srun that started this task."""
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
            f"would train apart; give torchrun --nnodes={tasks} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500, or let "
            "srun start samestep itself"
        )


def started(env: Mapping[str, str], first_host: str | None, port: int) -> Started | None:
    """Where this process stands among those that somebody's launcher has started; None when it is alone.

    first_host: the first machine of a Slurm job. port: where ranks meet that nobody has told of one.
    """
    launcher = launcher_around(env)
    if launcher is None:
        return None
    rank, size, local_rank, local_size, _ = places({**env, STARTED_BY: launcher})
    meeting = ""
    if launcher == "torchrun":
        name = env.get("TORCHELASTIC_RUN_ID", "none")
        identity = name if name != "none" else f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}"
    elif launcher == "srun":
        identity = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
        master = env.get("MASTER_ADDR") or first_host
        meeting = f"tcp://{_bracketed(str(master))}:{env.get('MASTER_PORT', port)}"
    else:
        identity = env.get("PMIX_NAMESPACE") or env.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or "0"
        if "MASTER_ADDR" in env and "MASTER_PORT" in env:
            meeting = f"tcp://{_bracketed(env['MASTER_ADDR'])}:{env['MASTER_PORT']}"
        elif local_size < size:
            example = "mpirun -x MASTER_ADDR=h1 -x MASTER_PORT=29500 …"
            if launcher == "horovodrun":
                example = "MASTER_ADDR=h1 MASTER_PORT=29500 horovodrun …"
            raise UserError(
                f"{launcher} tells its ranks on several machines of no place where torch's could meet; name rank 0's "
                f"machine, as in {example}"
            )
    return Started(launcher, rank, size, local_rank, local_size, identity, meeting)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def slurm_port(job_id: str, step_id: str = "0") -> int:
    """A port that follows from the numbers of the job and its step, so that two on one machine seldom share one."""
    step = int(step_id) if int(step_id) < INTERACTIVE_STEP else 0
    return 20000 + (int(job_id) + 97 * step) % 10000
