"""Study: what is asked, of a job and engines that have been inspected, and the rows that come of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from samestep import launch
from samestep.commands.ask_worker import ask
from samestep.commands.machines import launchers_variables, machines_of
from samestep.commands.setup import Setup
from samestep.errors import UserError, first_few, nearest, say
from samestep.launch import Machines, fork_client
from samestep.launch.started_by import LaunchedRank
from samestep.records.inspection import EngineFacts, Inspection, JobFacts, Question
from samestep.records.record import Record
from samestep.records.results import EngineResult, Verdict
from samestep.world import tasks_per_node
from samestep.world.network import check_interface


@dataclass(frozen=True)
class Study:
    """What to ask of a job. nproc: ranks on each machine. inspection: of the job, the engines and this machine."""

    setup: Setup
    nproc: int
    machines: Machines
    inspection: Inspection

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nproc * self.machines.nnodes

    @property
    def job(self) -> JobFacts:
        return self.inspection.the_job


@dataclass
class Row:
    """One engine under one launcher: a row of the table."""

    engine: str
    launcher: str
    facts: EngineFacts
    verdict: Verdict | None = None  # None: not yet judged
    launches: list[Record] = field(default_factory=list)
    loop_number: int = -1  # of the reference's layouts, the one that proves the loop
    numerics_number: int | None = None  # and the one that measures the numerics, where they are inexact

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.launcher}"

    @property
    def open(self) -> bool:
        """Not yet judged, or judged good: worth another launch."""
        return self.verdict is None or self.verdict.proven


def study_of(setup: Setup, inside: LaunchedRank | None = None) -> Study:
    """Asks a worker about the job and the engines. inside: this command is one rank of somebody's launcher."""
    inherited = Machines(timeout_s=setup.machines.timeout_s, interface=setup.machines.interface)
    machines = inherited if inside else machines_of(setup, os.environ)
    if setup.machines.interface:
        check_interface(setup.machines.interface)
    nproc = setup.nproc
    if nproc is None and machines.single_launch and "SLURM_TASKS_PER_NODE" in os.environ:
        with launchers_variables():
            nproc = tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"], 0)
    question = Question(
        job=setup.job,
        settings=setup.settings,
        device=setup.device,
        replicas=inside.size if inside else nproc,
        machines=machines.nnodes,
        steps=setup.steps,
        engines=setup.engines,
        engine_settings=setup.engine_settings,
    )
    inspection = ask(question, setup.deadline_s)
    here = inside.local_size if inside else inspection.replicas // machines.nnodes
    cores = os.cpu_count() or 1
    if inspection.devices[0] == "cpu" and here > cores and (inside is None or inside.local_rank == 0):
        say(f"{here} ranks share {cores} cores: the proof holds, the speed says little")
    return Study(setup, here, machines, inspection)


def rows_of(study: Study, *, forks: bool = False) -> list[Row]:
    """The rows of a study; those that cannot run here have their verdict already. Raises UserError for bad names.

    forks: whether ranks may be forked where nobody has named a launcher.
    """
    setup = study.setup
    known = {facts.name: facts for facts in study.inspection.engines}
    for name in setup.engines:
        if name not in known:
            raise UserError(f"there is no engine '{name}'; {nearest(name, list(known))}")
    chosen = setup.engines or tuple(known)
    if setup.rounds and "single" not in chosen:
        chosen = ("single", *chosen)  # what the others' speed is compared with
    rows = [
        Row(name, launcher, known[name], _verdict_before(study, known[name], launcher))
        for name in dict.fromkeys(chosen)
        for launcher in _launchers(study, known[name], forks)
    ]
    started, named = {row.launcher for row in rows}, {*setup.launchers} - {"all", launch.FORK}
    if setup.engines and named == {*setup.launchers} and named and not started & {*named, "-"}:
        able = {name: " or ".join(launch.launchers_for(known[name].process_kind)) for name in setup.engines}
        starts = "; ".join(f"{name} starts as {launchers}" for name, launchers in able.items())
        raise UserError(f"--launchers {','.join(setup.launchers)} starts none of the engines asked for: {starts}")
    return sorted(rows, key=lambda row: row.engine != "single")


def _launchers(study: Study, facts: EngineFacts, forks: bool) -> list[str]:
    able, asked = launch.launchers_for(facts.process_kind) or ["-"], study.setup.launchers
    if asked == (launch.FORK,) or (forks and not asked):
        return [launch.FORK] if _may_fork(study, facts) else able[:1]
    if "all" in asked:
        return able
    return [name for name in able if name in asked] or able[:1]


def _may_fork(study: Study, facts: EngineFacts) -> bool:
    """Whether an engine's ranks may be forked: on the CPU of one machine, where it needs no launcher of its own."""
    here = study.machines.nnodes == 1 and not study.machines.port and fork_client.is_possible()
    forkable = facts.process_kind in launch.load(launch.FORK).STARTS
    return here and forkable and facts.available and facts.devices[0] == "cpu"


def _verdict_before(study: Study, facts: EngineFacts, launcher: str) -> Verdict | None:
    absent = None if facts.available else facts.reason
    if facts.available:
        absent = launch.load(launcher).missing(study.machines, os.environ)
    if absent:
        return Verdict("unavailable", reason=absent)
    refused = refusal(facts, study.job)
    return Verdict("refused", reason=refused) if refused else None


def refusal(facts: EngineFacts, job: JobFacts) -> str | None:
    """Why an engine cannot train a job that its inspection has looked at, or None."""
    layout = facts.layout
    assert layout is not None
    if layout.every_gradient and job.unused:
        names = first_few(job.unused)
        setting = ", or --set-engine find_unused=true" if "find_unused" in facts.settings else ""
        return (
            f"{names}: no gradient, which {facts.name} cannot train with; "
            f"freeze such parameters, leave them out of the model{setting}"
        )
    if layout.no_scalars and job.scalars:
        names = first_few(job.scalars)
        return f"{facts.name} takes no scalar parameter: {names}; make it of shape [1], as in torch.ones(1)"
    if job.sync_batchnorm and job.batch_layers and layout.replicas > 1:
        if layout.lone_batchnorm:
            return f"SyncBatchNorm does not find the other ranks of {facts.name}; use ddp, or leave sync_batchnorm out"
        if facts.devices[0] == "cpu":
            return "torch's SyncBatchNorm runs on GPUs alone; leave sync_batchnorm out where there are none"
    return job.refused[layout.replicas]


def check_devices(nproc: int, inspection: Inspection, engines: tuple[str, ...] = ()) -> None:
    """Raises UserError when a rank would have no GPU of its own."""
    devices = inspection.devices
    wanted = [facts for facts in inspection.engines if not engines or facts.name in engines]
    if devices[0] != "cpu" and nproc > len(devices) and any(facts.process_kind != "one" for facts in wanted):
        raise UserError(
            f"--nproc {nproc} needs {nproc} GPUs, one for each rank, and this machine has {len(devices)}; "
            f"use --nproc {len(devices)}, or --device cpu to try it without"
        )


def result_of(row: Row) -> EngineResult:
    """A judged row as it stands in the results, without a measurement."""
    assert row.verdict is not None
    replicas = row.facts.replicas or None
    result = EngineResult(**vars(row.verdict), engine=row.engine, launcher=row.launcher, replicas=replicas)
    return replace(result, settings=row.facts.chosen)
