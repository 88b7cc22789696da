"""compare: engines x rounds, interleaved and resumable. Proves each engine, measures those that are proven.

One launch both measures and proves: the measured training comes first, so that the proof adds nothing to its memory
or time. Later rounds only measure. A launch that left its records is not repeated when the same study is resumed.
verify is a comparison without rounds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from samestep.commands import other_machines
from samestep.commands.machines import is_first, refuse_inside
from samestep.commands.results_folder import folder_of, package_digest, shared_folder
from samestep.commands.setup import Setup
from samestep.commands.study import Row, Study, check_devices, result_of, rows_of, study_of
from samestep.errors import Refused, TrainingFailed, UserError, say
from samestep.launch import Machines, fork_client, ports, supervise
from samestep.launch.command import command_for
from samestep.proof.judge import judge, one_process
from samestep.proof.plan import loop_layout, numerics_layout, plain_layout
from samestep.proof.plan import trainings as proof_trainings
from samestep.proof.trace import Expectation
from samestep.records.files import write, write_json
from samestep.records.plan import Measure, Plan, ReferencePlan, Training
from samestep.records.record import Progress, Record
from samestep.records.results import EngineResult, OneProcess, Proof, StudyResults, Verdict
from samestep.report.figures.speed import Measured, measurement
from samestep.version import __version__

Tell = Callable[[str, int, int], None]  # (what runs, launches done, launches in all)
Phases = Callable[[str], None]  # what a launch does now


def study(command: str, setup: Setup, tell: Tell) -> tuple[StudyResults, Path] | None:
    """Runs verify or compare on this machine. Returns what it found and the folder, with results.json and report.html;
    None on a machine that is not the first, whose part is done."""
    refuse_inside(command, os.environ, setup)
    with fork_client.running(*(("ranks", "reference") if setup.rounds == 0 else ("reference",))):
        asked = study_of(setup)
        if not is_first(asked.machines):
            count = other_machines.join_launches(asked, shared_folder(setup.out))
            say(f"this machine took part in {count} launches; the results are on {asked.machines.master}")
            return None
        folder = folder_of(command, asked)
        with other_machines.publishing(asked, folder):
            results = conduct(asked, folder, tell)
    return replace(results, report=os.path.relpath(folder / "report.html")), folder


def save(results: StudyResults, folder: Path) -> None:
    """Writes results.json and report.html."""
    from samestep import report

    write_json(folder / "results.json", results.as_json())
    (folder / "report.html").write_text(report.html(results), encoding="utf-8")


def conduct(study: Study, folder: Path, tell: Tell) -> StudyResults:
    """Runs the study, its launches' records under `folder`."""
    setup = study.setup
    check_devices(study.nproc, study.inspection, setup.engines)
    ports.check(study.machines)
    rows = rows_of(study, forks=setup.rounds == 0)
    planned = [row for row in rows if row.open]
    total = 1 + len(planned) * max(1, setup.rounds)
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    reference = _reference(study, planned, folder, lambda phase: tell(phase, 0, total)) if planned else None
    if setup.rounds:
        fork_client.close()  # nothing else is to run beside what is measured
    done = 1
    for number in range(max(1, setup.rounds)):
        for row in _rotated(planned, number):
            if row.open and reference:
                _launch(study, row, number, folder, reference, _teller(tell, row, done, total))
            done += 1
            tell(row.name, done, total)
    return _results(study, rows, reference, began)


def _rotated(rows: list[Row], by: int) -> Iterator[Row]:
    """Each round starts with another engine, so that none always runs first, or after the same one."""
    shift = by % len(rows) if rows else 0
    yield from rows[shift:] + rows[:shift]


def _teller(tell: Tell, row: Row, done: int, total: int) -> Phases:
    return lambda phase: tell(f"{row.name}: {phase}", done, total)


def _reference(study: Study, rows: list[Row], folder: Path, phases: Phases) -> Record:
    """Plays every layout that a row needs, and plain one-process training, in one process."""
    layouts = [] if study.job.refused[1] else [plain_layout()]
    for row in rows:
        loop, inexact = loop_layout(row.facts), numerics_layout(row.facts)
        layouts += [layout for layout in (loop, inexact) if layout and layout not in layouts]
        row.loop_number = layouts.index(loop)
        row.numerics_number = layouts.index(inexact) if inexact else None
    where, setup = folder / "reference", study.setup
    about = (str(where), time.time(), setup.job, setup.settings)
    plan = ReferencePlan(*about, layouts=tuple(layouts), steps=setup.steps, replicas=study.size)
    return _start(study, folder, "process", 1, study.inspection.devices, where, plan, phases)


def _launch(study: Study, row: Row, number: int, folder: Path, reference: Record, phases: Phases) -> None:
    setup = study.setup
    trainings: list[Training] = []
    if setup.rounds:
        trainings.append(Measure(setup.warmup_steps + setup.measured_steps))
    loop = Expectation(reference, row.loop_number)
    numerics = None if row.numerics_number is None else Expectation(reference, row.numerics_number)
    if number == 0:
        trainings += proof_trainings(row.facts, loop, setup.steps, study.size)
    where = folder / "launches" / f"{row.name}-{number}"
    about = (str(where), time.time(), setup.job, setup.settings)
    plan = Plan(*about, row.engine, row.facts.settings, tuple(trainings))
    try:
        record = _start(study, folder, row.launcher, row.facts.processes, row.facts.devices, where, plan, phases)
    except Refused as error:
        row.verdict = Verdict("refused", reason=str(error))
    except (UserError, TrainingFailed) as error:
        row.verdict = Verdict("failed", reason=str(error))
    else:
        row.launches.append(record)
        if number == 0:
            row.verdict = judge(loop, record, numerics)


def _start(
    study: Study,
    root: Path,
    launcher: str,
    size: int,
    devices: tuple[str, ...],
    folder: Path,
    plan: Plan | ReferencePlan,
    phases: Phases,
) -> Record:
    """Starts one launch of `size` ranks and waits for its record, unless that is there already."""
    if Record(folder).complete(size):
        return Record(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder / "plan.json", plan)
    plays_reference = isinstance(plan, ReferencePlan)
    machines = Machines() if launcher == "process" else study.machines  # one process is one machine's
    nproc = size // machines.nnodes
    flags = ("--reference",) if plays_reference else ()
    command = command_for(folder / "plan.json", launcher, nproc, devices, machines, flags)
    if plays_reference and devices[0] == "cpu":
        command = replace(command, fork="reference")
    if machines.nnodes > 1 and not machines.single_launch:
        place = str(folder.relative_to(root))
        other_machines.publish(root, other_machines.Launch(place, launcher, nproc, size, devices, time.time()))

    def watch(progress: Progress) -> None:
        phases(progress.phase)
        if study.machines.nnodes > 1:
            other_machines.publish(root)

    return supervise.run(command, folder, size, deadline_s=study.setup.deadline_s, watch=watch, machines=machines)


def _results(study: Study, rows: list[Row], reference: Record | None, started: str) -> StudyResults:
    """What was asked, of what, where; what the proof found; what the launches measured."""
    setup, job = study.setup, study.job
    played = [Expectation(reference, n) for n in range(len(reference.ranks[0].layouts))] if reference else []
    proof = Proof(setup.steps, "float64")
    if played:
        proof = Proof(setup.steps, played[0].facts.dtype, played[0].facts.float64_failed)
    return StudyResults(
        samestep=__version__,
        package=package_digest(),
        job=setup.job,
        settings=setup.settings,
        world_size=study.size,
        global_batch=job.global_batch,
        rows=job.rows,
        device=study.inspection.devices[0],
        machine=study.inspection.machine,
        threads_per_rank=1,
        workers=job.workers,
        dtype=job.dtype,
        started=started,
        proof=proof,
        engines=list(_engine_results(study, rows)),
        same_as_one_process=_one_process(study, played),
        repeats=setup.rounds or None,
        warmup_steps=setup.warmup_steps if setup.rounds else None,
        measured_steps=setup.measured_steps if setup.rounds else None,
    )


def _one_process(study: Study, played: list[Expectation]) -> OneProcess | None:
    proven = [expectation for expectation in played if "gradient" in expectation.facts.trainings]
    alone = next((each for each in proven if each.facts.layout.replicas == 1), None)
    many = next((each for each in proven if each.facts.layout.replicas > 1), None)
    return one_process(many, alone, study.job) if many and alone else None


def _engine_results(study: Study, rows: list[Row]) -> Iterator[EngineResult]:
    setup, job = study.setup, study.job
    baseline = next((row.launches for row in rows if row.engine == "single" and row.launches), [])
    sizes = (job.global_batch, job.rows, job.steps_per_epoch)
    measured = Measured(setup.warmup_steps, setup.measured_steps, *sizes)
    for row in rows:
        result = result_of(row)
        if setup.rounds and result.proven and row.launches:
            result = replace(result, **vars(measurement(row.launches, baseline, row.facts.replicas, measured)))
        yield result
