"""Finds the machines that a command runs on, and whether an outer launcher has started it as one of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from samestep import launch
from samestep.commands.machine_options import MachineOptions
from samestep.commands.setup import Setup
from samestep.errors import UserError
from samestep.launch import Machines, RankEnvironment, rendezvous_address
from samestep.launch.outer_launcher import LaunchedRank, launched_rank, outer_launcher, refuse_to_start_more
from samestep.world import RENDEZVOUS_PORT
from samestep.world.network import check_master, is_this_machine, route_to_host

LOCAL = Machines().master
OF_THE_LAUNCHER = ("port", "hosts", "node_rank", "master_addr", "max_restarts")  # fields of MachineOptions
RESTARTS = 10  # as --max-restarts, where machines may leave: torchrun counts each that does as one


class SecondMaster(UserError):
    """--node-rank 0 on a machine that is not that of --master-addr."""

    def __init__(self, machines: Machines) -> None:
        super().__init__(
            f"--node-rank 0 is for the machine of --master-addr, {machines.master}, and this is another; give each "
            "machine its own number"
        )
        self.machines = machines


def detect_launched_rank(env: Mapping[str, str], setup: Setup) -> LaunchedRank | None:
    """Returns this command's rank under an outer launcher; None where this command starts the ranks itself.

    Raises UserError when the launcher's variables contradict each other or the options, or when the other machines
    cannot reach rank 0's."""
    if setup.nproc or setup.machines.nnodes or setup.launchers:
        with reading_launcher_variables():
            refuse_to_start_more(env, setup.machines.max_nnodes)
        return None
    with reading_launcher_variables():
        launcher = outer_launcher(env)
        if launcher is None:
            return None
        environment = launch.environments()[launcher]
        host = env.get("MASTER_ADDR") or environment.rendezvous_host(env)
        rank = launched_rank(env, launcher, host, environment.rendezvous_port(env))
    for field in OF_THE_LAUNCHER:
        if getattr(setup.machines, field) != getattr(MachineOptions(), field):
            raise UserError(
                f"{rank.launcher} has started this rank, and --{field.replace('_', '-')} is for ranks that samestep "
                f"starts; leave it out, and give it to {rank.launcher} instead"
            )
    by_hand = "LOCAL_WORLD_SIZE" not in env  # then the number of machines is unknown
    if rank.local_size < rank.size and not (launcher == launch.DEFAULT and by_hand):
        check_master(host or LOCAL, 2, setup.machines.timeout_s)
    return rank


@contextmanager
def reading_launcher_variables() -> Iterator[None]:
    """Wraps code that reads a launcher's variables. Raises UserError where one is missing or malformed."""
    try:
        yield
    except (KeyError, ValueError) as error:
        what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        *first, last = sorted(environment.prefix for environment in launch.environments().values())
        raise UserError(
            f"a launcher's environment variables are incomplete or malformed ({what}); unset those that begin with "
            f"{', '.join(first)} or {last}, or start this command with that launcher"
        ) from error


def machines_of(setup: Setup, env: Mapping[str, str]) -> Machines:
    """Returns the machines that the options name; for a scheduler's launcher such as srun, those of its job."""
    options = setup.machines
    hosts, nnodes, node_rank = tuple(options.hosts), options.max_nnodes, options.node_rank
    master, port = options.master_addr, options.port
    with reading_launcher_variables():
        scheduler, nodes = _scheduler(setup, env)
        if scheduler:
            nnodes = nnodes or nodes
            master, port = master or scheduler.rendezvous_host(env), port or scheduler.rendezvous_port(env)
    in_job = scheduler is not None
    if hosts:
        nnodes, master = len(hosts), master or hosts[0]
        is_here = len(hosts) > 1 and not port and is_this_machine(master, options.timeout_s)
        port = port or (rendezvous_address.free_port(master) if is_here else 0)
    if nnodes is None and master and not hosts:
        raise UserError(f"--master-addr {master} is for several machines; give their number with --nnodes")
    nnodes = nnodes or 1
    if nnodes == 1 and not hosts and not in_job:
        master = ""  # a script for --nnodes $N may name the rendezvous for one machine, too: its ranks meet on itself
    if nnodes > 1 and not master:
        raise UserError(f"--nnodes {nnodes}: name the machine where the ranks meet, as in --master-addr h1")
    min_nodes = options.min_nnodes if nnodes > 1 else 0
    if min_nodes and (node_rank is not None or hosts):
        raise UserError(
            f"--nnodes {options.nnodes} lets machines leave and join, which the rendezvous numbers; leave out "
            f"{'--hosts' if hosts else '--node-rank'}"
        )
    if node_rank is not None and node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank} is not below --nnodes {nnodes}; machines count from 0")
    # A launcher may have started this command once on each machine.
    if node_rank is None and nnodes > 1 and not min_nodes:
        with reading_launcher_variables():
            environments = launch.environments().values()
            numbers = [known.node_rank(env, nnodes) for known in environments if known.node_rank]
        node_rank = next((number for number in numbers if number is not None), None)
    machines = Machines(
        nnodes=nnodes,
        node_rank=node_rank,
        master=master or LOCAL,
        port=port,
        hosts=hosts,
        single_launch=in_job or bool(hosts),
        interface=options.interface,
        max_restarts=options.max_restarts or (RESTARTS if min_nodes else 0),
        timeout_s=options.timeout_s,
        min_nodes=min_nodes,
    )
    if nnodes == 1:
        return machines
    check_master(machines.master, nnodes, machines.timeout_s)
    if node_rank == 0 and not machines.single_launch and not is_this_machine(machines.master):
        raise SecondMaster(replace(machines, port=machines.port or RENDEZVOUS_PORT))
    route = route_to_host(machines.master)
    is_master, address = is_this_machine(machines.master), route[1] if route else ""
    return replace(machines, is_master=is_master, local_address=address, port=machines.port or RENDEZVOUS_PORT)


def _scheduler(setup: Setup, env: Mapping[str, str]) -> tuple[RankEnvironment | None, int | None]:
    """Returns the environment of the scheduler's launcher whose job this is, if the setup names it, and the job's
    machines."""
    for name, scheduler in launch.schedulers().items():
        nodes = scheduler.allocated_nodes(env) if {name, "all"} & {*setup.launchers} else None
        if nodes is not None:
            return launch.environments()[name], nodes
    return None, None


def allocated_ranks(env: Mapping[str, str]) -> int | None:
    """Returns the ranks that a scheduler's job has on each machine; None outside of a job."""
    with reading_launcher_variables():
        counts = [scheduler.allocated_ranks(env) for scheduler in launch.schedulers().values()]
    return next((count for count in counts if count is not None), None)


def is_first(machines: Machines) -> bool:
    """Returns whether this machine conducts a comparison: the master, or the only machine that runs the command."""
    if machines.nnodes == 1 or machines.single_launch:
        return True
    return machines.node_rank == 0 if machines.node_rank is not None else is_this_machine(machines.master)


def refuse_under_launcher(command: str, env: Mapping[str, str], setup: Setup) -> None:
    """Raises UserError when an outer launcher has started several of a command that starts its ranks itself."""
    inside = {name: scheduler.where for name, scheduler in launch.schedulers().items()}
    with reading_launcher_variables():
        launcher = None if {*setup.launchers} & {*inside} else outer_launcher(env)
    if launcher:
        raise UserError(
            f"{command} starts its ranks itself, and {launcher} has started several copies; run it without "
            f"{launcher}" + (f", {inside[launcher]}, with --launcher {launcher}" if launcher in inside else "")
        )
