"""The rows of a command's table: which engines start with which launchers, and which are refused or unavailable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from samestep import engine, launch
from samestep.commands.inspected_setup import InspectedSetup
from samestep.commands.launch_ahead import LaunchAhead
from samestep.errors import UserError, nearest_engine, say
from samestep.launch import fork_client
from samestep.message import Message, as_said, message
from samestep.proof.plan import QUICK, loop_layout, numerics_layout, own_dtype_layout, without_life
from samestep.records.inspection import EngineFacts, JobFacts, Refusals
from samestep.records.plan import LayoutPlan
from samestep.records.record import Record
from samestep.records.results import ContinuedBy, EngineResult, SecondProof, Verdict


@dataclass
class SecondRow:
    """A row's engine on the second number of ranks. number: the index of the reference's layout that proves it."""

    launcher: str
    facts: EngineFacts
    number: int = -1
    verdict: Verdict | None = None  # None: no verdict yet


@dataclass
class Row:
    """One engine under one launcher: a row of the table."""

    launcher: str
    facts: EngineFacts
    verdict: Verdict | None = None  # None: no verdict yet
    launches: list[Record] = field(default_factory=list)
    loop_number: int = -1  # the index of the reference's layout that proves the loop
    numerics_number: int | None = None  # the index of the layout that measures the numerics, where they are inexact
    own_dtype_number: int | None = None  # the index of the layout in the job's own dtype, where the numerics are exact
    continued_by: EngineFacts | None = None  # the engine that continues the interrupted trainings
    continued_by_launcher: str = ""
    second: SecondRow | None = None
    ahead: LaunchAhead | None = None  # the first launch, where it began before the reference had ended

    @property
    def engine(self) -> str:
        return self.facts.name

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.launcher}"

    @property
    def open(self) -> bool:
        """Whether the row needs more launches: it has no verdict yet, or a proven one."""
        return self.verdict is None or self.verdict.proven


def rows_of(inspected: InspectedSetup, *, forks: bool = False) -> list[Row]:
    """Returns the rows of a setup; those that cannot run have a verdict already. Raises UserError for unknown names.

    forks: whether ranks may be forked where the user has named no launcher.
    """
    setup = inspected.setup
    known = {facts.name: facts for facts in inspected.inspection.engines}
    for name in setup.engines:
        if name not in known:
            raise UserError(message("no_such_engine", engine=name, hint=nearest_engine(name, list(known))))
        if setup.as_threads and (why := known[name].no_threads):
            raise UserError(message("engine_has_no_threads", engine=name, why=why))
    chosen = setup.engines or tuple(known)
    if setup.rounds and engine.BASELINE not in chosen:
        chosen = (engine.BASELINE, *chosen)
    rows = [
        Row(launcher, known[name], _verdict_without_launch(inspected, known[name], launcher))
        for name in dict.fromkeys(chosen)
        for launcher in _launchers(inspected, known[name], forks)
    ]
    for row in rows:
        if setup.resume:
            _add_continuation(inspected, row, forks)
        elif row.verdict is None:
            _add_second_size(inspected, row)
    used, named = {row.launcher for row in rows}, {*setup.launchers} - {"all", launch.FORK}
    if setup.engines and named == {*setup.launchers} and named and not used & {*named, "-"}:
        starts = [
            message("engine_starts_with", engine=name, launchers=launch.launchers_for(known[name].process_kind))
            for name in setup.engines
        ]
        raise UserError(
            message("launchers_start_none_of_these_engines", launchers=",".join(setup.launchers), starts=starts)
        )
    return sorted(rows, key=lambda row: row.engine != engine.BASELINE)


def _add_continuation(inspected: InspectedSetup, row: Row, forks: bool) -> None:
    """Gives a row the engine that continues its trainings, and a verdict where that cannot be launched."""
    assert inspected.continuing and inspected.setup.resume
    continuation = next(
        facts for facts in inspected.continuing.engines if facts.name == (inspected.setup.resume.engine or row.engine)
    )
    possible = _launchers(inspected, continuation, forks)
    row.continued_by, row.continued_by_launcher = (
        continuation,
        row.launcher if row.launcher in possible else possible[0],
    )
    if row.verdict is None:
        row.verdict = _verdict_without_launch(
            replace(inspected, inspection=inspected.continuing), continuation, row.continued_by_launcher
        )
    if row.verdict is None and (why := why_not_continued_by(row.facts, continuation)):
        row.verdict = Verdict("refused", reason=why)


def _add_second_size(inspected: InspectedSetup, row: Row) -> None:
    """Gives a row its engine on the second number of ranks, and a verdict where that cannot be launched there."""
    facts = next((facts for facts in inspected.inspection.second_engines if facts.name == row.engine), None)
    second = inspected.job.proof.second_of(row.facts)
    if second is None or facts is None or not facts.available:
        return
    if facts.layout == row.facts.layout and not facts.mesh:
        return  # an engine of one process has the same layout on all numbers of ranks
    too_few_gpus = facts.devices[0] != "cpu" and second.ranks > len(facts.devices)
    is_crowded = facts.devices[0] == "cpu" or too_few_gpus  # ranks with a GPU each are best processes
    by_threads = is_crowded and _why_no_threads() is None and facts.no_threads is None
    row.second = SecondRow(launch.THREADS if by_threads else row.launcher, facts)
    refusals = Refusals({facts.replicas: second.refused}, varying_calls=second.varying_calls)
    why = refusal(facts, replace(inspected.job, refusals=refusals))
    if too_few_gpus and not by_threads:
        why = message("too_few_gpus", flag="--also", ranks=second.ranks, gpus=len(facts.devices))
    if why:
        row.second.verdict = Verdict("refused", reason=why)


def why_not_continued_by(first: EngineFacts, continuation: EngineFacts) -> Message | None:
    """Returns why the proof cannot judge a training that two engines take in turn; None where it can."""
    assert first.numerics and continuation.numerics
    if (first.numerics.lossy or continuation.numerics.lossy) and first.name != continuation.name:
        lossy = first if first.numerics.lossy else continuation
        return message("lossy_engine_continues_alone", engine=lossy.name)
    shapes = [(facts.processes, facts.replicas) for facts in (first, continuation)]
    if (first.mesh or continuation.mesh) and first.mesh != continuation.mesh:
        return message("divided_replicas_continue_alone")
    if shapes[0] != shapes[1] and any(processes != replicas for processes, replicas in shapes):
        return message("replicas_of_one_process_continue_alone")
    return None


def _launchers(inspected: InspectedSetup, facts: EngineFacts, forks: bool) -> list[str]:
    possible, named = launch.launchers_for(facts.process_kind) or ["-"], inspected.setup.launchers
    if inspected.setup.as_threads and facts.process_kind != "one":
        return [launch.THREADS]
    if named == (launch.FORK,) or (forks and not named):
        return [launch.FORK] if _may_fork(inspected, facts) else possible[:1]
    if "all" in named:
        return possible
    return [name for name in possible if name in named] or possible[:1]


def _may_fork(inspected: InspectedSetup, facts: EngineFacts) -> bool:
    """Returns whether an engine's ranks may be forked: on the CPU of one machine, unless the engine needs its own
    launcher."""
    one_machine = inspected.machines.nnodes == 1 and not inspected.machines.port and fork_client.is_possible()
    forkable = facts.process_kind in launch.load(launch.FORK).starts
    return one_machine and forkable and facts.available and facts.devices[0] == "cpu"


def _verdict_without_launch(inspected: InspectedSetup, facts: EngineFacts, launcher: str) -> Verdict | None:
    """Returns the verdict of an engine that is unavailable or refuses the job; None for one to launch."""
    absent = None if facts.available else facts.reason
    if facts.available and launcher == launch.THREADS:
        absent = facts.no_threads or _why_no_threads()
    elif facts.available:
        missing = launch.load(launcher).missing(inspected.machines, os.environ)
        absent = as_said(missing) if missing else None
    if absent:
        return Verdict("unavailable", reason=absent)
    mesh, is_baseline = inspected.setup.mesh, inspected.setup.rounds and facts.name == engine.BASELINE
    if mesh and mesh.sizes and facts.process_kind == "one" and not is_baseline:
        axis = next(iter(mesh.sizes))
        return Verdict("refused", reason=message("engine_does_not_take_axis", engine=facts.name, axis=axis, axes=[]))
    if refusal(facts, inspected.job) is None:
        return None
    available = [
        candidate
        for candidate in inspected.inspection.engines
        if candidate.available and candidate.replicas in inspected.job.refusals.of_replicas
    ]
    able = [candidate.name for candidate in available if refusal(candidate, inspected.job) is None]
    return Verdict("refused", reason=refusal(facts, inspected.job, able))


def _why_no_threads() -> Message | None:
    """Returns why ranks cannot be threads here, whatever the engine; None where they can."""
    return None if fork_client.is_possible() else message("threads_need_linux")


def refusal(facts: EngineFacts, job: JobFacts, alternatives: Sequence[str] = ()) -> Message | None:
    """Returns why an engine cannot train an inspected job, or None. alternatives: the engines that can."""
    layout, engine = facts.layout, facts.name
    assert layout is not None
    if why := _undivided(facts, job):
        return why
    if layout.every_gradient and job.model.unused:
        setting = "--set-engine find_unused=true" if "find_unused" in facts.settings else None
        return message("engine_needs_every_gradient", engine=engine, parameters=job.model.unused, setting=setting)
    if layout.no_scalars and job.model.scalars:
        return message("engine_takes_no_scalar_parameter", engine=engine, parameters=job.model.scalars)
    if why := _varying_calls(engine, job, layout.replicas):
        return why
    phases = job.optimizer.phases
    for optimizer in phases.values() or [job.optimizer.name]:
        if unfit := layout.no_optimizers.get(optimizer):
            return message(
                "engine_cannot_take_optimizer", engine=engine, optimizer=optimizer, why=unfit, others=alternatives
            )
    if job.optimizer.needs_closure and not layout.closures:
        return message("engine_gives_no_closure", engine=engine, optimizer=job.optimizer.name, others=alternatives)
    if layout.no_phases and phases:
        return message("engine_takes_one_optimizer", engine=engine, phases=[*phases], others=alternatives)
    if job.sync_batchnorm and job.model.batch_layers and layout.replicas > 1:
        if layout.lone_batchnorm:
            return message("sync_batchnorm_does_not_find_other_ranks", engine=engine, others=alternatives)
        if facts.devices[0] == "cpu":
            return message("sync_batchnorm_needs_gpus")
    return job.refusals.of_replicas[layout.replicas]


def _undivided(facts: EngineFacts, job: JobFacts) -> Message | None:
    """Returns why an engine's ranks cannot be arranged as they are asked to be, or cannot divide the model so; or
    None."""
    sizes = facts.mesh.sizes if facts.mesh else {}
    if unfit := [axis for axis in sizes if axis not in facts.axes]:
        return message("engine_does_not_take_axis", engine=facts.name, axis=unfit[0], axes=facts.axes)
    if job.gather_outputs and 1 < facts.replicas < facts.processes:
        return message("outputs_of_divided_replicas_not_gathered", engine=facts.name)
    return job.refusals.undivided.get(facts.name)


def _varying_calls(engine: str, job: JobFacts, replicas: int) -> Message | None:
    """Returns why ranks would gather a module different numbers of times, and so wait for each other; else None."""
    varying = job.refusals.varying_calls.get(engine)
    is_even = job.data.global_batch % replicas == 0
    if varying is None or replicas == 1 or (varying.by == "rows" and is_even and job.data.last == "drop"):
        return None
    if varying.by == "data":
        return message("unit_called_by_data", engine=engine, unit=varying.unit)
    setting = "--set last=drop" if is_even else None
    return message("unit_called_by_rows", engine=engine, unit=varying.unit, setting=setting)


def layouts_of(row: Row, *, quick: bool) -> tuple[LayoutPlan, LayoutPlan | None, LayoutPlan | None]:
    """Returns the layouts that a row is compared with: of its loop, of its numerics where these are inexact, and else
    in the job's own dtype. quick: see Setup. Ranks that are threads live no run: they cannot wait for checkpoints."""
    loop, numerics = loop_layout(row.facts, row.continued_by), numerics_layout(row.facts, row.continued_by)
    if quick:
        return replace(loop, trainings=QUICK), numerics, None
    own_dtype = None if row.continued_by else own_dtype_layout(row.facts)
    if row.launcher == launch.THREADS:
        return without_life(loop), numerics, without_life(own_dtype) if own_dtype else None
    return loop, numerics, own_dtype


def say_divisions(inspected: InspectedSetup, rows: Sequence[Row]) -> None:
    """Says how the ranks of a replica divide the model, once for each engine that does."""
    for name in dict.fromkeys(row.engine for row in rows if row.engine in inspected.job.divided):
        say(inspected.job.divided[name])


def result_of(row: Row) -> EngineResult:
    """Returns the result of a row that has a verdict, without a measurement."""
    assert row.verdict is not None
    facts, continued_by = row.facts, row.continued_by
    absent = facts.reason is not None and facts.reason.id == "package_not_installed"
    return EngineResult(
        row.verdict.verdict,
        engine=row.engine,
        launcher=row.launcher,
        replicas=facts.replicas or None,
        settings=facts.chosen,
        install=facts.install if absent else None,
        continued_by=ContinuedBy(continued_by.name, continued_by.replicas) if continued_by else None,
        second=_second_proof(row.second) if row.second and row.second.verdict else None,
        mesh=str(facts.mesh or ""),
    ).with_verdict(row.verdict)


def _second_proof(second: SecondRow) -> SecondProof:
    """Returns the result on the second number of ranks, of which there is a verdict."""
    assert second.verdict is not None
    found = second.verdict
    return SecondProof(
        second.facts.processes,
        "threads" if second.launcher == launch.THREADS else "processes",
        found.verdict,
        bitwise=found.bitwise,
        max_difference=found.max_difference,
        bound=found.bound,
        reason=found.reason,
        mesh=str(second.facts.mesh or ""),
    )


def with_second(row: Row) -> Verdict:
    """Returns a proven row's verdict with what its second number of ranks has shown."""
    assert row.verdict and row.second and row.second.verdict
    found, facts = row.second.verdict, row.second.facts
    on = {"ranks": facts.processes, "mesh": str(facts.mesh or "") or None}
    if found.verdict == "differs":
        return replace(row.verdict, verdict="differs", bitwise=False, first_divergence=found.first_divergence)
    if found.verdict == "failed":
        why = message("on_second_number_of_ranks", why=found.reason, **on)
        return replace(row.verdict, verdict="failed", bitwise=False, reason=why)
    if found.verdict in ("refused", "unavailable"):
        note = message("not_proven_on_second_number_of_ranks", why=found.reason, **on)
        return replace(row.verdict, notes=(*row.verdict.notes, note))
    return row.verdict
