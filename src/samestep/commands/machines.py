"""The machines that a command runs on, and whether somebody's launcher has started the command as one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from samestep.commands.setup import Setup
from samestep.errors import UserError
from samestep.launch import Machines, ports
from samestep.launch.started_by import LaunchedRank, launched_rank, outer_launcher, refuse_to_start_more
from samestep.world import slurm
from samestep.world.network import check_master, is_this_machine, towards

LOCAL = Machines().master
TORCHRUN_PORT = 29500  # its own default


def started_already(env: Mapping[str, str], setup: Setup) -> LaunchedRank | None:
    """This command's place among the ranks that somebody's launcher has started; None where it starts ranks itself.
    Raises UserError when that contradicts itself, or what is asked, or the machines could not meet."""
    if setup.nproc or setup.machines.nnodes or setup.launchers:
        refuse_to_start_more(env, setup.machines.nnodes)
        return None
    in_job = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env and "MASTER_ADDR" not in env
    with launchers_variables():
        host = slurm.first_host(env) if in_job else None
        place = launched_rank(env, host, slurm.port_of(env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")))
    if place is None:
        return None
    asked = setup.machines
    given = {"port": asked.port, "hosts": asked.hosts, "node-rank": asked.node_rank, "master-addr": asked.master_addr}
    for option, value in {**given, "max-restarts": asked.max_restarts}.items():
        if value:
            raise UserError(
                f"{place.launcher} has started this rank, and --{option} is for ranks that samestep "
                f"starts; leave it out, and tell {place.launcher} instead"
            )
    by_hand = "LOCAL_WORLD_SIZE" not in env  # nothing then tells how many machines there are
    if place.local_size < place.size and not (place.launcher == "torchrun" and by_hand):
        check_master(env.get("MASTER_ADDR") or host or LOCAL, 2)
    return place


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


def machines_of(setup: Setup, env: Mapping[str, str]) -> Machines:
    """The machines that a command's options name; a Slurm job's for srun."""
    asked = setup.machines
    hosts, nnodes, node_rank = asked.hosts, asked.nnodes, asked.node_rank
    master, port = asked.master_addr, asked.port
    in_job = "SLURM_JOB_ID" in env and bool({"srun", "all"} & {*setup.launchers})
    if in_job:
        with launchers_variables():
            nnodes = nnodes or int(env["SLURM_JOB_NUM_NODES"])
            master, port = master or slurm.first_host(env), port or slurm.port_of(env["SLURM_JOB_ID"])
    if hosts:
        nnodes, master = len(hosts), master or hosts[0]
        port = port or (ports.any_free(master) if len(hosts) > 1 and is_this_machine(master) else 0)
    nnodes = nnodes or 1
    if nnodes == 1 and master and not hosts:
        raise UserError(f"--master-addr {master} is for several machines; give their number with --nnodes")
    if nnodes > 1 and not master:
        raise UserError(f"--nnodes {nnodes}: name the machine where the ranks meet, as in --master-addr h1")
    if node_rank is not None and node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank} is not below --nnodes {nnodes}; machines count from 0")
    if node_rank is None and nnodes > 1 and env.get("SLURM_NTASKS") == str(nnodes) and "SLURM_STEP_ID" in env:
        node_rank = int(env["SLURM_NODEID"])  # srun has started us once on each machine
    machines = Machines(
        nnodes=nnodes,
        node_rank=node_rank,
        master=master or LOCAL,
        port=port,
        hosts=hosts,
        single_launch=in_job or bool(hosts),
        interface=asked.interface,
        max_restarts=asked.max_restarts,
        timeout_s=asked.timeout_s,
    )
    if nnodes == 1:
        return machines
    check_master(machines.master, nnodes)
    way = towards(machines.master)
    leads, own = is_this_machine(machines.master), way[1] if way else ""
    return replace(machines, is_master=leads, local_address=own, port=machines.port or TORCHRUN_PORT)


def is_first(machines: Machines) -> bool:
    """Whether this machine is the one that is_master: the first of several, where the ranks meet."""
    if machines.nnodes == 1 or machines.single_launch:
        return True
    return machines.node_rank == 0 if machines.node_rank is not None else is_this_machine(machines.master)


def refuse_inside(command: str, env: Mapping[str, str], setup: Setup) -> None:
    """Raises UserError when a command that starts ranks itself was started as one of many."""
    launcher = None if "srun" in setup.launchers else outer_launcher(env)
    if launcher:
        raise UserError(
            f"{command} starts its ranks itself, and {launcher} has started it several times; type it without "
            f"{launcher}" + (", inside salloc or sbatch, with --launcher srun" if launcher == "srun" else "")
        )
