"""compare: proves each engine, and measures the proven ones in interleaved rounds; resumable.

One launch both measures and proves: the measured training comes first, so that the proof adds nothing to its memory
or time. Later rounds only measure. A resumed comparison does not repeat a launch whose records are complete.
verify is a comparison without measured rounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from samestep.commands import other_machines
from samestep.commands.command_options import ProofOptions
from samestep.commands.compare_results import results_of
from samestep.commands.engine_rows import Row, layouts_of, rows_of, say_divisions, with_second
from samestep.commands.inspected_setup import InspectedSetup, check_devices, inspect_setup
from samestep.commands.launch_ahead import LaunchAhead, ShowPhase, has_cores_for
from samestep.commands.machines import is_first, refuse_under_launcher
from samestep.commands.needs import check_needs, need_of, refuse_large_second_size, room_in
from samestep.commands.progress import Launches
from samestep.commands.proof_launches import ProofLaunches
from samestep.commands.results_folder import recorded, results_folder, shared_folder, words_of
from samestep.commands.setup import Setup
from samestep.errors import Refused, TrainingFailed, UserError, say
from samestep.launch import FORK, THREADS, fork_client, rendezvous_address
from samestep.message import message
from samestep.proof.judge import judge, judge_second_size
from samestep.proof.one_process import one_process
from samestep.proof.plan import (
    AS_NUMERICS,
    AS_OWN,
    LoopTrainings,
    as_planned,
    as_played,
    held_layouts,
    interrupted,
    plain_layout,
    second_layout,
    second_trainings,
)
from samestep.proof.plan import trainings as proof_trainings
from samestep.proof.resume import JoinedRecord, judge_resumed
from samestep.proof.trace import Expectation
from samestep.records.files import replace_text
from samestep.records.launch_files import OF_CHECKPOINTS
from samestep.records.plan import Interrupted, LayoutPlan, MeasureTask, Plan, Task
from samestep.records.record import Record
from samestep.records.results import CompareResults, OneProcess, Verdict, write_results
from samestep.report.language import with_english
from samestep.world import nvidia
from samestep.world.regular_files import remove_folder

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
        launches = ProofLaunches(inspected, folder, lambda phase: show(phase, 0, total))
        reference = _reference(launches, planned) if planned else None
        if reference and not setup.resume:
            answer = _one_process(launches, planned, reference)
        if setup.rounds:
            fork_client.close("reference")  # nothing else may run during a measurement; the ranks' servers wait
            fork_client.wait(setup.deadline_s)
        done = 1
        for number in range(max(1, setup.rounds)):
            for row in _rotated(planned, number):
                if row.open and reference:
                    launches = ProofLaunches(inspected, folder, _phase_callback(show, row, done, total))
                    _launch(launches, row, number, reference)
                done += 1
                if number == 0 and row.second and reference:
                    if row.open:
                        launches = ProofLaunches(inspected, folder, _phase_callback(show, row, done, total))
                        _launch_second(launches, row, reference)
                    done += 1
                show(row.name, done, total)
    return replace(results_of(inspected, rows, reference, began), same_as_one_process=answer)


@contextmanager
def _launched_ahead(inspected: InspectedSetup, rows: list[Row], folder: Path) -> Iterator[None]:
    """Launches the first row during the block, while the reference is played, where that disturbs neither."""
    if not _fits_beside_the_reference(inspected, rows, folder):
        yield
        return
    row = rows[0]
    loop, _, own_dtype = layouts_of(row, quick=inspected.setup.quick)
    plan = _plan_of_launch(inspected, row, 0, folder, as_planned(loop), as_planned(own_dtype) if own_dtype else None)

    def start(plan: Plan, show_phase: ShowPhase) -> Record:
        return ProofLaunches(inspected, folder, show_phase).start(row.launcher, row.facts, plan)

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
    if inspected.job.proof.costly or "life" in loop.trainings:  # of a costly step the reference takes all cores
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


def _reference(launches: ProofLaunches, rows: list[Row]) -> Record:
    """Runs the reference in one process: the layout of every row, and plain one-process training."""
    inspected = launches.inspected
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
    trains_alone = not inspected.job.refusals.of_replicas[1]
    if several and LayoutPlan() not in layouts and trains_alone and not inspected.setup.resume:
        layouts.append(plain_layout())
    return launches.play("reference", tuple(layouts))


def _one_process(launches: ProofLaunches, rows: list[Row], reference: Record) -> OneProcess | None:
    """Judges whether N ranks train the job as one process does; None where either cannot be played. Where they do not,
    plays the reference with held random numbers and no batch statistics, to tell what is expected from a mistake."""
    inspected = launches.inspected
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
        layouts = held_layouts(several_replicas.facts, constant=constant)
        record = launches.play("constant" if constant else "held_randomness", layouts)
        return Expectation(record, 0), Expectation(record, 1)

    return one_process(several_replicas, one_replica, play, inspected.job)


def _plan_of_launch(
    inspected: InspectedSetup, row: Row, number: int, folder: Path, loop: LoopTrainings, own_dtype: LoopTrainings | None
) -> Plan:
    """Returns the plan of launch `number` of a row. loop, own_dtype: the trainings of a first one."""
    setup, proof = inspected.setup, inspected.job.proof
    trainings: list[Task] = []
    if setup.rounds:
        trainings.append(MeasureTask(setup.warmup_steps + setup.measured_steps, costs=number == 0))
    if number == 0:
        trainings += proof_trainings(
            row.facts,
            loop,
            proof.steps,
            inspected.size,
            proof.rows,
            extremes=proof.extremes,
            own_dtype=own_dtype,
        )
    launch_folder = folder / "launches" / f"{row.name}-{number}"
    identity = (str(launch_folder), time.time(), setup.job, setup.settings)
    machines = setup.machines
    threads = (machines.planned_threads, inspected.nproc, machines.threads or 1)
    return Plan(*identity, row.engine, row.facts.settings, tuple(trainings), *threads, mesh=row.facts.mesh)


def _launch(launches: ProofLaunches, row: Row, number: int, reference: Record) -> None:
    """Runs launch `number` of a row; the first one proves the engine too, and gives the row its verdict."""
    inspected, folder = launches.inspected, launches.folder
    loop, numerics, in_own_dtype = _expected(row, reference)
    own_dtype = as_played(in_own_dtype) if in_own_dtype else None
    plan = _plan_of_launch(inspected, row, number, folder, as_played(loop), own_dtype)
    try:
        if row.continued_by:
            row.verdict = _interrupted(launches, row, plan, reference)
            return
        if row.ahead and row.ahead.is_of(plan):
            record = row.ahead.record(launches.show_phase)
        else:
            if row.ahead:
                row.ahead.close()
            record = launches.start(row.launcher, row.facts, plan)
    except Refused as error:
        row.verdict = Verdict("refused", reason=error.message)
    except (UserError, TrainingFailed) as error:
        row.verdict = Verdict("failed", reason=error.message)
        if number == 0:
            row.verdict = launches.with_origin(row, plan)
    else:
        row.launches.append(record)
        if number == 0:

            def judge_by(draws: Record) -> Verdict:
                loop, numerics, in_own_dtype = _expected(row, draws)
                return judge(loop, record, numerics, in_own_dtype)

            expectations = {"{}": loop, AS_NUMERICS: numerics, AS_OWN: in_own_dtype}
            row.verdict = launches.explained(
                launches.judged(reference, judge_by, [record.folder]), expectations, record
            )
            row.verdict = launches.with_origin(row, plan)
            if row.launcher == THREADS and not inspected.setup.quick:
                row.verdict = replace(row.verdict, notes=(*row.verdict.notes, message("life_not_as_threads")))


def _expected(row: Row, reference: Record) -> tuple[Expectation, Expectation | None, Expectation | None]:
    """Returns what a row's loop is compared with, its numerics, and the job's own dtype; None where they are not."""
    numbers = row.numerics_number, row.own_dtype_number
    numerics, in_own_dtype = (None if number is None else Expectation(reference, number) for number in numbers)
    return Expectation(reference, row.loop_number), numerics, in_own_dtype


def _launch_second(launches: ProofLaunches, row: Row, reference: Record) -> None:
    """Proves a row on the second number of ranks, too. What threads show is confirmed by processes: a fault that only
    they have is none of the training's. On GPUs they are threads where there are too few GPUs for processes."""
    second, setup = row.second, launches.inspected.setup
    assert second and row.verdict and row.facts.numerics
    if second.verdict is None:
        second.verdict = _second_verdict(launches, row, reference)
    if second.verdict.verdict in ("differs", "failed") and second.launcher == THREADS and not setup.as_threads:
        devices = second.facts.devices
        if devices[0] != "cpu":
            fields = {"ranks": second.facts.processes, "gpus": len(devices)}
            second.verdict = Verdict("refused", reason=message("threads_not_confirmed", **fields))
        else:
            second.launcher = row.launcher
            second.verdict = _second_verdict(launches, row, reference)
    row.verdict = with_second(row)


def _second_verdict(launches: ProofLaunches, row: Row, reference: Record) -> Verdict:
    """Returns the verdict of a launch on the second number of ranks."""
    inspected, second = launches.inspected, row.second
    setup = inspected.setup
    assert second and row.facts.numerics
    loop, inexact = Expectation(reference, second.number), row.facts.numerics.lossy
    if loop.facts.not_played:
        why = next(iter(loop.facts.not_played.values()))
        return Verdict("refused", reason=message("reference_not_played", why=why))
    subset = second_layout(second.facts, inspected.job).subset
    assert subset
    launch_folder = launches.folder / "launches" / f"{row.engine}-{second.launcher}-{subset.replicas}-ranks"
    plan = Plan(
        str(launch_folder),
        time.time(),
        setup.job,
        setup.settings,
        row.engine,
        second.facts.settings,
        trainings=second_trainings(second.facts, loop, subset, inspected.job.proof.extremes),
        threads=setup.machines.planned_threads,
        nproc=subset.replicas,
        proof_threads=setup.machines.threads or 1,
        mesh=second.facts.mesh,
    )
    try:
        record = launches.start(second.launcher, second.facts, plan)
    except Refused as error:
        return Verdict("refused", reason=error.message)
    except (UserError, TrainingFailed) as error:
        return Verdict("failed", reason=error.message)

    def judge_by(draws: Record) -> Verdict:
        return judge_second_size(Expectation(draws, second.number), record, inexact=inexact)

    return launches.explained(launches.judged(reference, judge_by, [record.folder]), {"{}": loop}, record)


def _interrupted(launches: ProofLaunches, row: Row, plan: Plan, reference: Record) -> Verdict:
    """Runs the first launch of an interrupted proof, and the one that continues it. Returns the verdict."""
    assert row.continued_by
    inspected, (loop, numerics, _) = launches.inspected, _expected(row, reference)
    proof = inspected.job.proof
    facts, continuation = row.facts, row.continued_by
    parts = Interrupted(f"{plan.out}-checkpoints", "first", facts.replicas != continuation.replicas)
    trainings = [
        proof_trainings(engine, as_played(loop), proof.steps, inspected.size, proof.rows, extremes=proof.extremes)
        for engine in (facts, continuation)
    ]
    first = replace(plan, trainings=interrupted(trainings[0], parts))
    began = launches.start(row.launcher, facts, first)
    second = replace(
        plan,
        out=f"{plan.out}-continued",
        engine=continuation.name,
        engine_settings=continuation.settings,
        mesh=continuation.mesh,
        trainings=interrupted(trainings[1], replace(parts, part="rest")),
    )
    continued = launches.start(row.continued_by_launcher, continuation, second)
    remove_folder(Path(parts.checkpoints), OF_CHECKPOINTS)
    record = JoinedRecord(continued.folder, began)

    def judge_by(draws: Record) -> Verdict:
        loop, numerics, _ = _expected(row, draws)
        return judge_resumed(loop, record, numerics)

    verdict = launches.judged(reference, judge_by, [continued.folder, began.folder])
    return launches.explained(verdict, {"{}": loop, AS_NUMERICS: numerics}, record)
