"""compare: proves each engine, and measures the proven ones in interleaved rounds; resumable.

One launch both measures and proves: the measured training comes first, so that the proof adds nothing to its memory
or time. Later rounds only measure. A resumed comparison does not repeat a launch whose records are complete.
verify is a comparison without measured rounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from samestep.commands import other_machines
from samestep.commands.axis_trials import SECONDS_OF_ONE, with_origin
from samestep.commands.command_options import ProofOptions
from samestep.commands.engine_rows import Row, layouts_of, result_of, rows_of, say_divisions, with_second
from samestep.commands.inspected_setup import InspectedSetup, check_devices, inspect_setup
from samestep.commands.launch_ahead import LaunchAhead, ShowPhase, has_cores_for
from samestep.commands.machines import is_first, refuse_under_launcher
from samestep.commands.needs import check_needs, need_of, refuse_large_second_size, room_in
from samestep.commands.progress import Launches, TimeLeft
from samestep.commands.results_folder import package_digest, recorded, results_folder, shared_folder, words_of
from samestep.commands.setup import Setup
from samestep.engine import BASELINE
from samestep.errors import Refused, TrainingFailed, UserError, say
from samestep.launch import FORK, THREADS, Machines, fork_client, rendezvous_address, supervise
from samestep.launch.command import command_for, shared_devices
from samestep.message import message
from samestep.proof.hypotheses import with_tried_cause
from samestep.proof.judge import judge, judge_second_size
from samestep.proof.one_process import one_process
from samestep.proof.plan import (
    AS_NUMERICS,
    AS_OWN,
    LoopTrainings,
    as_planned,
    as_played,
    interrupted,
    neutral_layouts,
    plain_layout,
    second_layout,
    second_steps,
    second_trainings,
)
from samestep.proof.plan import trainings as proof_trainings
from samestep.proof.resume import JoinedRecord, judge_resumed
from samestep.proof.trace import Expectation
from samestep.records.files import read, replace_text, write
from samestep.records.inspection import EngineFacts
from samestep.records.launch_files import OF_A_LAUNCH, OF_CHECKPOINTS
from samestep.records.monitor import SUMMARY, MonitorSummary
from samestep.records.plan import Interrupted, LayoutPlan, MeasureTask, Plan, ReferencePlan, Task
from samestep.records.record import Progress, Record
from samestep.records.redaction import redacted_values
from samestep.records.results import CompareResults, EngineResult, OneProcess, Proof, Verdict, write_results
from samestep.report.figures.speed import Measured, measurement
from samestep.report.language import with_english
from samestep.version import __version__
from samestep.world import nvidia
from samestep.world.regular_files import fresh_folder, remove_file, remove_folder

VERDICT = "verdict.json"  # in the folder of a launch that is proven

ShowProgress = Callable[[str, int, int], None]  # (phase, launches done, launches in all)


def compare_engines(command: str, options: ProofOptions, job: str, typed: str = "") -> CompareResults | None:
    """Runs verify or compare, shows its progress, and writes results.json and report.html.

    Returns the results; None on a machine that is not the first, which has started its ranks of each launch.

    job: as workers load it. typed: the command line, which the report shows.
    """
    from samestep import report

    setup = options.setup(job)
    refuse_under_launcher(command, os.environ, setup)
    with Launches() as progress, fork_client.running(*fork_servers_for(setup)):
        inspected = inspect_setup(setup)
        if not is_first(inspected.machines):
            count = other_machines.join_launches(inspected, shared_folder(setup.out))
            say(message("machine_took_part_in_launches", launches=count, master=inspected.machines.master))
            return None
        folder = results_folder(command, inspected)
        with recorded(folder, words_of(command, options, job)), other_machines.publishing(inspected, folder):
            results = _run_launches(inspected, folder, progress.show)
    results = with_english(replace(results, command=typed, report=os.path.relpath(folder / "report.html")))
    write_results(results, folder)
    replace_text(folder / "report.html", report.html(results))
    return results


def fork_servers_for(setup: Setup) -> tuple[Literal["ranks", "reference"], ...]:
    """Returns which fork servers a comparison needs: none where it may use GPUs, for what uses CUDA is not forked."""
    if setup.device.startswith("cuda") or (setup.device == "auto" and nvidia.visible()):
        return ()
    return ("ranks", "reference") if setup.rounds == 0 or setup.launchers == (FORK,) else ("reference",)


def _run_launches(inspected: InspectedSetup, folder: Path, show: ShowProgress) -> CompareResults:
    """Runs the reference and all launches of a comparison, with their records under `folder`."""
    setup = inspected.setup
    check_devices(inspected.nproc, inspected.inspection, setup.engines, as_threads=setup.as_threads)
    if setup.resume and setup.resume.nproc:
        check_devices(setup.resume.nproc, inspected.inspection, setup.engines)
    rendezvous_address.check_port(inspected.machines)
    rows = rows_of(inspected, forks=setup.rounds == 0)
    planned = [row for row in rows if row.open]
    say_divisions(inspected, planned)
    if planned and not Record(folder / "reference").complete(1):
        check_needs(need_of(inspected, planned), room_in(folder), inspected.inspection.devices[0])
        refuse_large_second_size(inspected, planned, room_in(folder))
    total = 1 + len(planned) * max(1, setup.rounds) + sum(row.second is not None for row in planned)
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    preloads = {row.facts.preloads for row in planned if row.launcher == FORK}
    fork_client.preload(*preloads - {()}, deadline_s=setup.deadline_s)
    answer = None
    with _launched_ahead(inspected, planned, folder):
        reference = _reference(inspected, planned, folder, lambda phase: show(phase, 0, total)) if planned else None
        if reference and not setup.resume:
            answer = _one_process(inspected, planned, folder, reference, lambda phase: show(phase, 0, total))
        if setup.rounds:
            fork_client.close("reference")  # nothing else may run during a measurement; the ranks' servers wait
            fork_client.wait(setup.deadline_s)
        done = 1
        for number in range(max(1, setup.rounds)):
            for row in _rotated(planned, number):
                if row.open and reference:
                    _launch(inspected, row, number, folder, reference, _phase_callback(show, row, done, total))
                done += 1
                if number == 0 and row.second and reference:
                    if row.open:
                        _launch_second(inspected, row, folder, reference, _phase_callback(show, row, done, total))
                    done += 1
                show(row.name, done, total)
    return replace(_results(inspected, rows, reference, began), same_as_one_process=answer)


@contextmanager
def _launched_ahead(inspected: InspectedSetup, rows: list[Row], folder: Path) -> Iterator[None]:
    """Launches the first row during the block, while the reference is played, where that disturbs neither."""
    if not _fits_beside_the_reference(inspected, rows, folder):
        yield
        return
    row = rows[0]
    loop, _, own = layouts_of(row, quick=inspected.setup.quick)
    plan = _plan_of_launch(inspected, row, 0, folder, as_planned(loop), as_planned(own) if own else None)

    def start(plan: Plan, show_phase: ShowPhase) -> Record:
        return _start(inspected, folder, row.launcher, row.facts, plan=plan, show_phase=show_phase)

    row.ahead = LaunchAhead(plan, start)
    with closing(row.ahead):
        yield


def _fits_beside_the_reference(inspected: InspectedSetup, rows: list[Row], folder: Path) -> bool:
    """Returns whether the reference is still to be played, does not alone say what the first row trains, and leaves it
    a core for each of its processes and memory."""
    setup = inspected.setup
    if not rows or setup.rounds or setup.resume or Record(folder / "reference").complete(1):
        return False
    row, one_machine = rows[0], inspected.machines.nnodes == 1
    if row.launcher not in (THREADS, FORK) or not one_machine or inspected.inspection.devices[0] != "cpu":
        return False
    loop, _, _ = layouts_of(row, quick=setup.quick)
    if inspected.job.costly or "life" in loop.trainings:  # of a costly step the reference takes all cores
        return False
    processes = 1 if row.launcher == THREADS else row.facts.processes
    at_once = need_of(inspected, rows).memory_at_once
    return has_cores_for(1 + processes) and at_once <= room_in(folder).free_memory


def _rotated(rows: list[Row], shift: int) -> Iterator[Row]:
    """Yields the rows of a round: each round starts with another engine, so that none always runs first."""
    offset = shift % len(rows) if rows else 0
    yield from rows[offset:] + rows[:offset]


def _phase_callback(show: ShowProgress, row: Row, done: int, total: int) -> ShowPhase:
    return lambda phase: show(f"{row.name}: {phase}", done, total)


def _reference(inspected: InspectedSetup, rows: list[Row], folder: Path, show_phase: ShowPhase) -> Record:
    """Runs the reference in one process: the layout of every row, and plain one-process training."""
    layouts: list[LayoutPlan] = []
    for row in rows:
        loop, inexact, in_own_dtype = layouts_of(row, quick=inspected.setup.quick)
        layouts += [layout for layout in (loop, inexact, in_own_dtype) if layout and layout not in layouts]
        row.loop_number = layouts.index(loop)
        row.numerics_number = layouts.index(inexact) if inexact else None
        row.own_dtype_number = layouts.index(in_own_dtype) if in_own_dtype else None
    for second in (row.second for row in rows if row.second and row.second.verdict is None):
        layout = second_layout(second.facts, inspected.job)
        layouts += [layout] if layout not in layouts else []
        second.number = layouts.index(layout)
    several = any(layout.replicas > 1 for layout in layouts)
    if several and LayoutPlan() not in layouts and not inspected.job.refused[1] and not inspected.setup.resume:
        layouts.append(plain_layout())
    return _play(inspected, folder, "reference", tuple(layouts), show_phase)


def _play(
    inspected: InspectedSetup, root: Path, name: str, layouts: tuple[LayoutPlan, ...], show_phase: ShowPhase
) -> Record:
    """Plays layouts in one process, and returns their record, in the folder `name`."""
    folder, setup, job = root / name, inspected.setup, inspected.job
    identity = (str(folder), time.time(), setup.job, setup.settings)
    plan = ReferencePlan(
        *identity,
        layouts=layouts,
        steps=job.proof_steps,
        replicas=inspected.size,
        rows=job.proof_rows,
        extremes=job.extremes,
        noise_runs=1 if job.costly or setup.quick else 2,
        threads=setup.machines.threads or (0 if job.costly else 1),
    )
    return _start(inspected, root, "process", None, plan=plan, show_phase=show_phase)


def _one_process(
    inspected: InspectedSetup, rows: list[Row], folder: Path, reference: Record, show_phase: ShowPhase
) -> OneProcess | None:
    """Whether N ranks train the job as one process does; None where either cannot be played. Where they do not, plays
    the reference with held random numbers and no batch statistics, to tell what is expected from a mistake."""
    seconds = {row.second.number for row in rows if row.second}  # on other rows
    played = [
        Expectation(reference, number)
        for number, layout in enumerate(reference.ranks[0].layouts)
        if layout.layout.replicas in (1, inspected.size) and number not in seconds
    ]
    one_replica = next((expectation for expectation in played if expectation.facts.layout.replicas == 1), None)
    several_replicas = next((expectation for expectation in played if expectation.facts.layout.replicas > 1), None)
    if one_replica is None or several_replicas is None:
        return None

    def play(constant: bool) -> tuple[Expectation, Expectation]:
        layouts = neutral_layouts(several_replicas.facts, constant=constant)
        record = _play(inspected, folder, "constant" if constant else "neutral", layouts, show_phase)
        return Expectation(record, 0), Expectation(record, 1)

    return one_process(several_replicas, one_replica, play, inspected.job)


def _plan_of_launch(
    inspected: InspectedSetup, row: Row, number: int, folder: Path, loop: LoopTrainings, own: LoopTrainings | None
) -> Plan:
    """Returns the plan of launch `number` of a row. loop, own: the trainings of a first one."""
    setup, job = inspected.setup, inspected.job
    trainings: list[Task] = []
    if setup.rounds:
        trainings.append(MeasureTask(setup.warmup_steps + setup.measured_steps, costs=number == 0))
    if number == 0:
        trainings += proof_trainings(
            row.facts,
            loop,
            job.proof_steps,
            inspected.size,
            job.proof_rows,
            extremes=job.extremes,
            own=own,
        )
    launch_folder = folder / "launches" / f"{row.name}-{number}"
    identity = (str(launch_folder), time.time(), setup.job, setup.settings)
    machines = setup.machines
    threads = (machines.planned_threads, inspected.nproc, machines.threads or 1)
    return Plan(*identity, row.engine, row.facts.settings, tuple(trainings), *threads, mesh=row.facts.mesh)


def _launch(
    inspected: InspectedSetup, row: Row, number: int, folder: Path, reference: Record, show_phase: ShowPhase
) -> None:
    """Runs launch `number` of a row; the first one proves the engine too, and gives the row its verdict."""
    setup = inspected.setup
    loop = Expectation(reference, row.loop_number)
    numerics = None if row.numerics_number is None else Expectation(reference, row.numerics_number)
    in_own_dtype = None if row.own_dtype_number is None else Expectation(reference, row.own_dtype_number)
    own = as_played(in_own_dtype) if in_own_dtype else None
    plan = _plan_of_launch(inspected, row, number, folder, as_played(loop), own)
    try:
        if row.continued_by:
            row.verdict = _interrupted(inspected, row, plan, folder, (loop, numerics), show_phase)
            return
        if row.ahead and row.ahead.is_of(plan):
            record = row.ahead.record(show_phase)
        else:
            if row.ahead:
                row.ahead.close()
            record = _start(inspected, folder, row.launcher, row.facts, plan=plan, show_phase=show_phase)
    except Refused as error:
        row.verdict = Verdict("refused", reason=error.message)
    except (UserError, TrainingFailed) as error:
        row.verdict = Verdict("failed", reason=error.message)
        if number == 0:
            row.verdict = _with_origin(inspected, row, plan, folder, show_phase)
    else:
        row.launches.append(record)
        if number == 0:
            row.verdict = _judged(record.folder, lambda: judge(loop, record, numerics, in_own_dtype))
            expectations = {"{}": loop, AS_NUMERICS: numerics, AS_OWN: in_own_dtype}
            row.verdict = _explained(inspected, folder, row.verdict, expectations, record, show_phase)
            row.verdict = _with_origin(inspected, row, plan, folder, show_phase)
            if row.launcher == THREADS and not setup.quick:
                row.verdict = replace(row.verdict, notes=(*row.verdict.notes, message("life_not_as_threads")))


def _launch_second(inspected: InspectedSetup, row: Row, folder: Path, reference: Record, show_phase: ShowPhase) -> None:
    """Proves a row on the second number of ranks, too. What threads show is confirmed by processes: a fault that only
    they have is none of the training's. On GPUs they are threads where there are too few GPUs for processes."""
    second, setup = row.second, inspected.setup
    assert second and row.verdict and row.facts.numerics
    if second.verdict is None:
        second.verdict = _second_verdict(inspected, row, folder, reference, show_phase)
    if second.verdict.verdict in ("differs", "failed") and second.launcher == THREADS and not setup.as_threads:
        devices = second.facts.devices
        if devices[0] != "cpu":
            fields = {"ranks": second.facts.processes, "gpus": len(devices)}
            second.verdict = Verdict("refused", reason=message("threads_not_confirmed", **fields))
        else:
            second.launcher = row.launcher
            second.verdict = _second_verdict(inspected, row, folder, reference, show_phase)
    row.verdict = with_second(row)


def _second_verdict(
    inspected: InspectedSetup, row: Row, folder: Path, reference: Record, show_phase: ShowPhase
) -> Verdict:
    """Returns the verdict of a launch on the second number of ranks."""
    second, setup = row.second, inspected.setup
    assert second and row.facts.numerics
    loop, inexact = Expectation(reference, second.number), row.facts.numerics.lossy
    if loop.facts.not_played:
        why = next(iter(loop.facts.not_played.values()))
        return Verdict("refused", reason=message("reference_not_played", why=why))
    subset = second_layout(second.facts, inspected.job).subset
    assert subset
    launch_folder = folder / "launches" / f"{row.engine}-{second.launcher}-{subset.replicas}-ranks"
    plan = Plan(
        str(launch_folder),
        time.time(),
        setup.job,
        setup.settings,
        row.engine,
        second.facts.settings,
        trainings=second_trainings(second.facts, loop, subset, inspected.job.extremes),
        threads=setup.machines.planned_threads,
        nproc=subset.replicas,
        proof_threads=setup.machines.threads or 1,
        mesh=second.facts.mesh,
    )
    try:
        record = _start(inspected, folder, second.launcher, second.facts, plan=plan, show_phase=show_phase)
    except Refused as error:
        return Verdict("refused", reason=error.message)
    except (UserError, TrainingFailed) as error:
        return Verdict("failed", reason=error.message)
    verdict = _judged(record.folder, lambda: judge_second_size(loop, record, inexact=inexact))
    return _explained(inspected, folder, verdict, {"{}": loop}, record, show_phase)


def _explained(
    inspected: InspectedSetup,
    root: Path,
    verdict: Verdict,
    expectations: Mapping[str, Expectation | None],
    record: Record,
    show_phase: ShowPhase,
) -> Verdict:
    """Returns a verdict with the cause of its difference, which the reference tries in one more process. expectations:
    as of with_tried_cause."""

    def play(plan: ReferencePlan) -> Record:
        return _start(inspected, root, "process", None, plan=plan, show_phase=show_phase)

    try:
        return with_tried_cause(verdict, expectations, record, f"{record.folder}-causes", play)
    except (UserError, TrainingFailed):  # the difference stands, with what its figures alone say
        return verdict


def _with_origin(inspected: InspectedSetup, row: Row, plan: Plan, root: Path, show_phase: ShowPhase) -> Verdict:
    """Returns a row's verdict with the axes of its mesh along which it is wrong, in more launches as the row has."""
    assert row.verdict
    setup = inspected.setup
    bounded = replace(setup, deadline_s=min(setup.deadline_s or SECONDS_OF_ONE, SECONDS_OF_ONE))

    def start(part: Plan | ReferencePlan, facts: EngineFacts | None) -> Record:
        launcher = row.launcher if facts else "process"
        return _start(replace(inspected, setup=bounded), root, launcher, facts, plan=part, show_phase=show_phase)

    return with_origin(inspected, row.verdict, plan, start)


def _judged(folder: Path, judgement: Callable[[], Verdict], *other_folders: Path) -> Verdict:
    """Returns the verdict on the launch in `folder`: the one that was given before, where there is one.

    Of a launch that is proven the weights have served their purpose, and are deleted, and those in `others`.
    """
    path = folder / VERDICT
    if path.exists():
        return read(Verdict, path)
    verdict = judgement()
    if verdict.proven:
        write(path, verdict)
        for weights in (file for launch_folder in (folder, *other_folders) for file in launch_folder.glob("rank*.npz")):
            remove_file(weights)
    return verdict


def _interrupted(
    inspected: InspectedSetup,
    row: Row,
    plan: Plan,
    folder: Path,
    expected: tuple[Expectation, Expectation | None],
    show_phase: ShowPhase,
) -> Verdict:
    """Runs the first launch of an interrupted proof, and the one that continues it. Returns the verdict."""
    assert row.continued_by
    job, (loop, numerics) = inspected.job, expected
    facts, continuation = row.facts, row.continued_by
    parts = Interrupted(f"{plan.out}-checkpoints", "first", facts.replicas != continuation.replicas)
    trainings = [
        proof_trainings(engine, as_played(loop), job.proof_steps, inspected.size, job.proof_rows, extremes=job.extremes)
        for engine in (facts, continuation)
    ]
    first = replace(plan, trainings=interrupted(trainings[0], parts))
    began = _start(inspected, folder, row.launcher, facts, plan=first, show_phase=show_phase)
    second = replace(
        plan,
        out=f"{plan.out}-continued",
        engine=continuation.name,
        engine_settings=continuation.settings,
        mesh=continuation.mesh,
        trainings=interrupted(trainings[1], replace(parts, part="rest")),
    )
    continued = _start(inspected, folder, row.continued_by_launcher, continuation, plan=second, show_phase=show_phase)
    remove_folder(Path(parts.checkpoints), OF_CHECKPOINTS)
    record = JoinedRecord(continued.folder, began)
    verdict = _judged(continued.folder, lambda: judge_resumed(loop, record, numerics), began.folder)
    return _explained(inspected, folder, verdict, {"{}": loop, AS_NUMERICS: numerics}, record, show_phase)


def _start(
    inspected: InspectedSetup,
    root: Path,
    launcher: str,
    facts: EngineFacts | None,
    *,
    plan: Plan | ReferencePlan,
    show_phase: ShowPhase,
) -> Record:
    """Runs one launch of an engine, unless its record is complete already. Returns the record. facts: of the engine;
    None: of the reference, which is one process."""
    folder, size, devices = Path(plan.out), 1, inspected.inspection.devices
    if facts:
        size, devices = facts.processes, facts.devices
    if Record(folder).complete(size) and _trains_the_same(folder, plan):
        return Record(folder)
    fresh_folder(root, folder, OF_A_LAUNCH)
    write(folder / "plan.json", plan)
    is_reference = isinstance(plan, ReferencePlan)
    machines = Machines() if launcher == "process" else inspected.machines  # one process needs one machine
    nproc = size // machines.nnodes
    flags: tuple[str, ...] = ("--reference",) if is_reference else ()
    as_threads = launcher == THREADS
    if as_threads:
        launcher, flags, devices = "process", ("--threads", str(size)), shared_devices(devices, size)
    command = command_for(folder / "plan.json", launcher, nproc, devices, machines, flags)
    if is_reference and devices[0] == "cpu":
        command = replace(command, fork="reference")
    elif as_threads and devices[0] == "cpu":
        command = replace(command, fork="ranks")
    if facts:
        command = replace(command, preloads=facts.preloads)
    if machines.nnodes > 1 and not machines.single_launch:
        relative = str(folder.relative_to(root))
        other_machines.publish(
            inspected, root, other_machines.Launch(relative, launcher, nproc, size, devices, time.time())
        )

    left = TimeLeft()

    def watch(progress: Progress) -> None:
        done = progress.done
        time_left = left.after(done, progress.steps, time.monotonic()) if is_reference and done is not None else ""
        show_phase(progress.activity + (f", {time_left} left" if time_left else ""))
        if inspected.machines.nnodes > 1:
            other_machines.publish(inspected, root)

    return supervise.run(
        command,
        folder,
        size,
        deadline_s=inspected.setup.deadline_s,
        stall_s=inspected.setup.stall_s,
        watch=watch,
        machines=machines,
        samples_usage=bool(inspected.setup.rounds) and not is_reference,
        as_threads=as_threads,
    )


def _trains_the_same(folder: Path, plan: Plan | ReferencePlan) -> bool:
    """Returns whether the launch whose record lies in `folder` has trained what `plan` asks for: one that was launched
    ahead of an interrupted reference may have had another learning rate."""
    return isinstance(plan, ReferencePlan) or read(Plan, folder / "plan.json").trainings == plan.trainings


def _results(inspected: InspectedSetup, rows: list[Row], reference: Record | None, started: str) -> CompareResults:
    """Collects the results: the question, the job, the machine, the verdicts and the measurements."""
    setup, job = inspected.setup, inspected.job
    references = [Expectation(reference, n) for n in range(len(reference.ranks[0].layouts))] if reference else []
    of_step = job.proof_rows or job.global_batch
    proof = Proof(job.proof_steps, "float64", rows=of_step, quick=setup.quick, rows_looked_at=job.rows_looked_at)
    if any(row.second for row in rows):
        proof = replace(proof, second_steps=second_steps(job))
    if references:
        facts = references[0].facts
        proof = replace(proof, dtype=facts.dtype, float64_failed=facts.float64_failed)
    return CompareResults(
        samestep=__version__,
        package=package_digest(),
        job=setup.job,
        settings=redacted_values(setup.settings),
        world_size=inspected.size,
        global_batch=job.global_batch,
        rows=job.rows,
        device=inspected.inspection.devices[0],
        machine=inspected.inspection.machine,
        threads_per_rank=_threads(rows, setup),
        workers=job.workers,
        dtype=job.dtype,
        started=started,
        proof=proof,
        engines=list(_engine_results(inspected, rows)),
        tensors=_tensors(references),
        repeats=setup.rounds or None,
        warmup_steps=setup.warmup_steps if setup.rounds else None,
        measured_steps=setup.measured_steps if setup.rounds else None,
    )


def _threads(rows: list[Row], setup: Setup) -> int:
    """Returns the threads of each rank: the same under every engine."""
    counts = {rank.threads for row in rows for record in row.launches for rank in record.ranks}
    return max(counts, default=setup.machines.threads or 1)


def _tensors(references: list[Expectation]) -> int | None:
    """Counts the tensors of the model's state."""
    played = [expectation for expectation in references if "sgd" in expectation.facts.trainings]
    return len(played[0].noise_distances("sgd")) if played else None


def _engine_results(inspected: InspectedSetup, rows: list[Row]) -> Iterator[EngineResult]:
    setup, job = inspected.setup, inspected.job
    baseline = next((row.launches for row in rows if row.engine == BASELINE and row.launches), [])
    sizes = (job.global_batch, job.rows, job.steps_per_epoch, max(1, len(job.phases)))
    measured = Measured(setup.warmup_steps, setup.measured_steps, *sizes)
    for row in rows:
        result = result_of(row)
        if setup.rounds and result.proven and row.launches:
            figures = measurement(row.launches, baseline, row.facts.replicas, measured)
            used = row.launches[-1].folder / SUMMARY  # absent where the disk has taken no samples
            monitor = read(MonitorSummary, used) if used.exists() else None
            result = result.with_measurement(replace(figures, monitor=monitor))
        yield result
