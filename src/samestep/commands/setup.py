"""What commands do before anything starts: the options checked, the machines known, the job inspected, a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep import __version__, engine, launch
from samestep.commands import results_folder
from samestep.commands.ask_worker import ask
from samestep.commands.options import split
from samestep.commands.study import Study
from samestep.errors import UserError, say
from samestep.launch import Machines, ports
from samestep.launch.started_by import Started, launcher_around, refuse_to_start_more, started
from samestep.world import slurm, tasks_per_node
from samestep.world.network import check_interface, check_master, is_here, towards

LOCAL = Machines().master
TORCHRUN_PORT = 29500  # its own default
FOREVER_S = 1e6  # sockets take no longer waits


def started_already(env: Mapping[str, str], asked: Mapping[str, Any]) -> Started | None:
    """This command's place among the ranks that somebody's launcher has started; None where it starts ranks itself.
    Raises UserError when that contradicts itself, or what is asked, or the machines could not meet."""
    if asked["nproc"] or asked["nnodes"] or asked["launchers"]:
        refuse_to_start_more(env, asked["nnodes"])
        return None
    in_job = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env and "MASTER_ADDR" not in env
    with launchers_variables():
        host = slurm.first_host(env) if in_job else None
        found = started(env, host, slurm.port_of(env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")))
    for option in ("port", "hosts", "node_rank", "master_addr", "max_restarts"):
        if found and asked[option]:
            raise UserError(
                f"{found.launcher} has started this rank, and --{option.replace('_', '-')} is for ranks that samestep "
                f"starts; leave it out, and tell {found.launcher} instead"
            )
    by_hand = "LOCAL_WORLD_SIZE" not in env  # nothing then tells how many machines there are
    if found and found.local_size < found.size and not (found.launcher == "torchrun" and by_hand):
        check_master(env.get("MASTER_ADDR") or host or LOCAL, 2)
    return found


@contextmanager
def launchers_variables() -> Iterator[None]:
    """Reads them inside. Raises UserError where there is only a part of a launcher's variables, or odd ones."""
    try:
        yield
    except (KeyError, ValueError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"the environment holds some of a launcher's variables and not all, or odd ones ({what}); unset those that "
            "begin with SLURM_, OMPI_, HOROVOD_ or TORCHELASTIC_, or start this command by that launcher"
        ) from error


def machines_of(asked: Mapping[str, Any], env: Mapping[str, str]) -> Machines:
    """The machines that a command's options name; a Slurm job's for srun."""
    hosts = split(asked["hosts"])
    nnodes, master, port = asked["nnodes"], asked["master_addr"], asked["port"]
    in_job = "SLURM_JOB_ID" in env and bool({"srun", "all"} & {*split(asked["launchers"])})
    if in_job:
        with launchers_variables():
            nnodes = nnodes or int(env["SLURM_JOB_NUM_NODES"])
            master, port = master or slurm.first_host(env), port or slurm.port_of(env["SLURM_JOB_ID"])
    if hosts:
        nnodes, master = len(hosts), master or hosts[0]
        port = port or (ports.any_free(master) if len(hosts) > 1 and is_here(master) else 0)
    nnodes = nnodes or 1
    if nnodes == 1 and master and not hosts:
        raise UserError(f"--master-addr {master} is for several machines; give their number with --nnodes")
    if nnodes > 1 and not master:
        raise UserError(f"--nnodes {nnodes}: name the machine where the ranks meet, as in --master-addr h1")
    if asked["node_rank"] is not None and asked["node_rank"] >= nnodes:
        raise UserError(f"--node-rank {asked['node_rank']} is not below --nnodes {nnodes}; machines count from 0")
    node_rank = asked["node_rank"]
    if node_rank is None and nnodes > 1 and env.get("SLURM_NTASKS") == str(nnodes) and "SLURM_STEP_ID" in env:
        node_rank = int(env["SLURM_NODEID"])  # srun has started us once on each machine
    found = Machines(
        nnodes=nnodes,
        node_rank=node_rank,
        master=master or LOCAL,
        port=port,
        hosts=hosts,
        reached=in_job or bool(hosts),
        interface=asked["interface"],
        max_restarts=asked["max_restarts"],
        timeout_s=asked["timeout"],
    )
    if nnodes > 1:
        check_master(found.master, nnodes)
        way = towards(found.master)
        found = replace(found, leads=is_here(found.master), own=way[1] if way else "", port=found.port or TORCHRUN_PORT)
    return found


def is_first(machines: Machines) -> bool:
    """Whether this machine is the one that leads: the first of several, where the ranks meet."""
    if machines.nnodes == 1 or machines.reached:
        return True
    return machines.node_rank == 0 if machines.node_rank is not None else is_here(machines.master)


def study_of(
    job: str, settings: Mapping[str, str], asked: Mapping[str, Any], inside: Started | None = None
) -> tuple[Study, dict[str, Any]]:
    """Checks what the user gave, as far as it can be without starting a training, and asks a worker about the job."""
    nproc = asked["nproc"]
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least one rank must train; give --nproc 1 or more")
    if nproc is not None and nproc > 64 * (os.cpu_count() or 1):
        raise UserError(f"--nproc {nproc}: this machine has {os.cpu_count()} cores; give at most 64 ranks for each")
    names: dict[str, Any] = {key: split(asked[key]) for key in ("engines", "launchers")}
    for key in names:
        if asked[key] and not names[key]:
            raise UserError(f"--{key} {asked[key]!r} names none; leave it out for all of them")
    if "all" in names["engines"]:
        names["engines"] = ()
    for name in names["engines"]:
        engine.check(name)
    for name in names["launchers"]:
        if name != "all":
            launch.load(name)
    for option in ("timeout", "deadline_s"):
        if asked[option] is not None and not asked[option] < FOREVER_S:
            raise UserError(f"--{option.removesuffix('_s')} {asked[option]:g}: give at most {FOREVER_S:.0f} seconds")
    inherited = Machines(timeout_s=asked["timeout"], interface=asked["interface"])
    machines = inherited if inside else machines_of(asked, os.environ)
    if asked["interface"]:
        check_interface(asked["interface"])
    if nproc is None and machines.reached and "SLURM_TASKS_PER_NODE" in os.environ:
        with launchers_variables():
            nproc = tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"], 0)
    found = ask(
        job,
        settings,
        device=asked["device"],
        replicas=inside.size if inside else nproc,
        machines=machines.nnodes,
        steps=asked.get("steps", 8),
        deadline_s=asked["deadline_s"],
        engines=names["engines"],
        engine_settings=asked["engine_settings"],
    )
    here = inside.local_size if inside else found["replicas"] // machines.nnodes
    kept = ("engine_settings", "device", "steps", "rounds", "measured_steps", "warmup_steps", "deadline_s")
    study = Study(
        job=job,
        settings=settings,
        nproc=here,
        machines=machines,
        **{key: asked[key] for key in kept if key in asked},
        **names,
    )
    cores = os.cpu_count() or 1
    if found["devices"][0] == "cpu" and here > cores and (inside is None or inside.local_rank == 0):
        say(f"{here} ranks share {cores} cores: the proof holds, the speed says little")
    return study, found


def refuse_inside(command: str, env: Mapping[str, str], launchers: str) -> None:
    """Raises UserError when a command that starts ranks itself was started as one of many."""
    found = None if "srun" in launchers else launcher_around(env)
    if found:
        raise UserError(
            f"{command} starts its ranks itself, and {found} has started it several times; type it without {found}"
            + (", inside salloc or sbatch, with --launcher srun" if found == "srun" else "")
        )


def shared_folder(out: Path | None) -> Path:
    """The folder that several machines share. Raises UserError when none is named."""
    if out is None:
        raise UserError("several machines prove together in one folder that they share; name it with --out")
    return out.resolve()


def folder_of(
    command: str,
    study: Study,
    found: Mapping[str, Any],
    out: Path | None,
    inside: Started | None = None,
    weights: str | None = None,
) -> Path:
    """The folder of a command's results: made, locked by its one writer, and recognised when it is resumed.

    weights: a digest of those that are evaluated."""
    if study.machines.nnodes > 1 and not study.machines.reached and command != "run":
        out = shared_folder(out)
    name = f"{inside.launcher}-{inside.id}" if inside else ""
    writes = inside.rank == 0 if inside else is_first(study.machines)
    versions = {"samestep": __version__, "torch": found["machine"]["torch"]}
    identity = {
        "command": command,
        "file": found["job"]["source"],
        "package": results_folder.package_digest(),
    } | versions
    kept = {key: value for key, value in vars(study).items() if key not in ("deadline_s", "machines")}
    kept["nnodes"] = study.machines.nnodes
    if weights:
        kept["weights"] = weights
    return results_folder.prepare(out, study.job, identity | kept, name, writes=writes)


def launch_folder(out: Path, study: Study, inside: Started | None) -> Path:
    """Where the launch of this machine writes: `out`, or a folder of its own in it, since `out` may be shared."""
    if inside:
        own = out / f"rank-{inside.rank}"
    elif study.machines.nnodes > 1 and not study.machines.reached:
        own = out / f"machine-{socket.gethostname()}"
    else:
        return out
    own.mkdir(exist_ok=True)
    return own
