"""InspectedSetup: the setup of a command with its inspected job, engines and machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from samestep.commands.ask_worker import ask
from samestep.commands.machines import SecondMaster, allocated_ranks, machines_of
from samestep.commands.setup import Setup, check_rank_number, second_size_refused
from samestep.errors import UserError, say
from samestep.launch import Machines, rendezvous_address
from samestep.launch.outer_launcher import LaunchedRank
from samestep.message import Message, message
from samestep.records.inspection import Inspection, JobFacts, Question
from samestep.world.network import check_interface, check_loopback

# The part of an evaluation that draws random numbers -> the warning.
RANDOM_EVALUATION = {
    "dataset": "evaluation_dataset_draws_random_numbers",
    "collate": "evaluation_collate_draws_random_numbers",
    "model": "evaluated_model_draws_random_numbers",
}


@dataclass(frozen=True)
class InspectedSetup:
    """A setup with its inspection of the job, the engines and this machine. nproc: ranks on each machine."""

    setup: Setup
    nproc: int
    machines: Machines
    inspection: Inspection
    continuing: Inspection | None = None  # rows for the replicas that continue an interrupted proof

    @property
    def size(self) -> int:
        """The world size: the ranks on all machines."""
        return self.nproc * self.machines.nnodes

    @property
    def job(self) -> JobFacts:
        return self.inspection.the_job


def inspect_setup(setup: Setup, rank: LaunchedRank | None = None) -> InspectedSetup:
    """Inspects the job and the engines of a setup. rank: of this command, where an outer launcher has started it."""
    inherited = Machines(timeout_s=setup.machines.timeout_s, interface=setup.machines.interface)
    machines = inherited if rank else _machines_to_train_on(setup)
    several = machines.nnodes > 1 or (rank is not None and rank.local_size < rank.size)
    if setup.machines.interface:
        check_interface(setup.machines.interface, several=several)
    nproc = setup.nproc
    if nproc is None and machines.single_launch:
        nproc = allocated_ranks(os.environ)
    if setup.mesh and rank:
        setup.mesh.check_ranks(rank.size)
    elif setup.mesh:
        setup.mesh.check_ranks(nproc or max(1, setup.mesh.size // machines.nnodes), machines.nnodes)
        nproc = setup.mesh.size // machines.nnodes
        check_rank_number("--mesh", nproc, as_threads=setup.as_threads)
    question = Question(
        job=setup.job,
        settings=setup.settings,
        device=setup.device,
        replicas=rank.size if rank else nproc,
        machines=machines.nnodes,
        least=machines.min_nodes,
        steps=setup.steps,
        engines=setup.engines,
        engine_settings=setup.engine_settings,
        also=0 if machines.nnodes > 1 else setup.also,
        proves=setup.proves,
        mesh=setup.mesh,
        as_threads=setup.as_threads,
    )
    if setup.resume and setup.engines and setup.resume.engine:
        question = replace(question, engines=(*setup.engines, setup.resume.engine))
    inspection, continuing = ask(question, setup.deadline_s, setup.stall_s), None
    if setup.also == inspection.replicas:  # where --nproc was left to the machine
        raise second_size_refused(setup.also, "second_size_is_the_first")
    if setup.resume:
        resumed = replace(question, replicas=setup.resume.nproc or question.replicas)
        continuing = inspection if resumed == question else ask(resumed, setup.deadline_s, setup.stall_s)
    local_size = rank.local_size if rank else inspection.replicas // machines.nnodes
    chosen = [facts for facts in inspection.engines if facts.name in setup.engines or not setup.engines]
    if any(facts.processes > 1 for facts in chosen):
        if rank is None:
            check_loopback()
        cores = os.cpu_count() or 1
        is_cpu = inspection.devices[0] == "cpu" and not setup.as_threads
        if is_cpu and local_size > cores and (rank is None or rank.local_rank == 0):
            say(message("more_ranks_than_cores", ranks=local_size, cores=cores))
    if inspection.job and inspection.job.evaluation.draws and (rank is None or rank.rank == 0):
        say(Message(RANDOM_EVALUATION[inspection.job.evaluation.draws[0]]))
    return InspectedSetup(setup, local_size, machines, inspection, continuing)


def _machines_to_train_on(setup: Setup) -> Machines:
    """Returns the machines of the options. Raises UserError where this one has the master's number; reports it to the
    master, which would wait for the missing number."""
    try:
        return machines_of(setup, os.environ)
    except SecondMaster as error:
        its = error.machines
        say(message("node_rank_0_is_another_machine", master=its.master))
        rendezvous_address.report_second_master(its.master, its.port, its.nnodes, its.timeout_s)
        raise


def check_devices(
    nproc: int, inspection: Inspection, engines: tuple[str, ...] = (), *, as_threads: bool = False
) -> None:
    """Raises UserError when there are fewer GPUs than ranks on this machine. as_threads: the ranks share them."""
    devices = inspection.devices
    if as_threads:
        return
    wanted = [facts for facts in inspection.engines if not engines or facts.name in engines]
    if devices[0] != "cpu" and nproc > len(devices) and any(facts.process_kind != "one" for facts in wanted):
        raise UserError(message("too_few_gpus", flag="--nproc", ranks=nproc, gpus=len(devices)))
