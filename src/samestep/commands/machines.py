"""Finds the machines that a command runs on, and whether an outer launcher has started it as one of its ranks."""

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
TORCHRUN_PORT = 29500  # torchrun's default
RESTARTS = 10  # as --max-restarts, where machines may leave: torchrun counts each that does as one


def detect_launched_rank(env: Mapping[str, str], setup: Setup) -> LaunchedRank | None:
    """Returns this command's rank under an outer launcher; None where this command starts the ranks itself.

    Raises UserError when the launcher's variables contradict each other or the options, or when the other machines
    cannot reach rank 0's."""
    if setup.nproc or setup.machines.nnodes or setup.launchers:
        refuse_to_start_more(env, setup.machines.most_nnodes)
        return None
    in_job = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env and "MASTER_ADDR" not in env
    with reading_launcher_variables():
        host = slurm.first_host(env) if in_job else None
        rank = launched_rank(env, host, slurm.port_of(env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")))
    if rank is None:
        return None
    machines = setup.machines
    given = {"port": machines.port, "hosts": machines.hosts, "node-rank": machines.node_rank}
    given |= {"master-addr": machines.master_addr, "max-restarts": machines.max_restarts}
    for option, value in given.items():
        if value:
            raise UserError(
                f"{rank.launcher} has started this rank, and --{option} is for ranks that samestep "
                f"starts; leave it out, and give it to {rank.launcher} instead"
            )
    by_hand = "LOCAL_WORLD_SIZE" not in env  # then the number of machines is unknown
    if rank.local_size < rank.size and not (rank.launcher == "torchrun" and by_hand):
        check_master(env.get("MASTER_ADDR") or host or LOCAL, 2)
    return rank


@contextmanager
def reading_launcher_variables() -> Iterator[None]:
    """Wraps code that reads a launcher's variables. Raises UserError where one is missing or malformed."""
    try:
        yield
    except (KeyError, ValueError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"a launcher's environment variables are incomplete or malformed ({what}); unset those that "
            "begin with SLURM_, OMPI_, HOROVOD_ or TORCHELASTIC_, or start this command with that launcher"
        ) from error


def machines_of(setup: Setup, env: Mapping[str, str]) -> Machines:
    """Returns the machines that the options name; for srun, the Slurm job's."""
    options = setup.machines
    hosts, nnodes, node_rank = options.hosts, options.most_nnodes, options.node_rank
    master, port = options.master_addr, options.port
    in_job = "SLURM_JOB_ID" in env and bool({"srun", "all"} & {*setup.launchers})
    if in_job:
        with reading_launcher_variables():
            nnodes = nnodes or int(env["SLURM_JOB_NUM_NODES"])
            master, port = master or slurm.first_host(env), port or slurm.port_of(env["SLURM_JOB_ID"])
    if hosts:
        nnodes, master = len(hosts), master or hosts[0]
        port = port or (ports.any_free(master) if len(hosts) > 1 and is_this_machine(master) else 0)
    if nnodes is None and master and not hosts:
        raise UserError(f"--master-addr {master} is for several machines; give their number with --nnodes")
    nnodes = nnodes or 1
    if nnodes == 1 and not hosts and not in_job:
        master = ""  # a script for --nnodes $N may name the rendezvous for one machine, too: its ranks meet on itself
    if nnodes > 1 and not master:
        raise UserError(f"--nnodes {nnodes}: name the machine where the ranks meet, as in --master-addr h1")
    least = options.least_nnodes if nnodes > 1 else 0
    if least and (node_rank is not None or hosts):
        raise UserError(
            f"--nnodes {options.nnodes} lets machines leave and join, which the rendezvous numbers; leave out "
            f"{'--hosts' if hosts else '--node-rank'}"
        )
    if node_rank is not None and node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank} is not below --nnodes {nnodes}; machines count from 0")
    numbered = node_rank is not None or nnodes == 1 or least
    if not numbered and env.get("SLURM_NTASKS") == str(nnodes) and "SLURM_STEP_ID" in env:
        node_rank = int(env["SLURM_NODEID"])  # srun has started this command once on each machine
    machines = Machines(
        nnodes=nnodes,
        node_rank=node_rank,
        master=master or LOCAL,
        port=port,
        hosts=hosts,
        single_launch=in_job or bool(hosts),
        interface=options.interface,
        max_restarts=options.max_restarts or (RESTARTS if least else 0),
        timeout_s=options.timeout_s,
        least=least,
    )
    if nnodes == 1:
        return machines
    check_master(machines.master, nnodes)
    if node_rank == 0 and not machines.single_launch and not is_this_machine(machines.master):
        raise UserError(
            f"--node-rank 0 is for the machine of --master-addr, {machines.master}, and this is another; give each "
            "machine its own number"
        )
    route = towards(machines.master)
    is_master, address = is_this_machine(machines.master), route[1] if route else ""
    return replace(machines, is_master=is_master, local_address=address, port=machines.port or TORCHRUN_PORT)


def is_first(machines: Machines) -> bool:
    """Whether this machine conducts a study: the master, or the only machine that runs the command."""
    if machines.nnodes == 1 or machines.single_launch:
        return True
    return machines.node_rank == 0 if machines.node_rank is not None else is_this_machine(machines.master)


def refuse_under_launcher(command: str, env: Mapping[str, str], setup: Setup) -> None:
    """Raises UserError when an outer launcher has started several of a command that starts its ranks itself."""
    launcher = None if "srun" in setup.launchers else outer_launcher(env)
    if launcher:
        raise UserError(
            f"{command} starts its ranks itself, and {launcher} has started it several times; type it without "
            f"{launcher}" + (", inside salloc or sbatch, with --launcher srun" if launcher == "srun" else "")
        )
