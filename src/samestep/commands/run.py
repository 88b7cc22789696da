"""run and evaluate: one launch trains the whole job, or evaluates weights, and writes results.json."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from samestep import launch
from samestep.commands.command_options import EvaluateOptions, RunOptions
from samestep.commands.engine_rows import Row, rows_of, say_divisions
from samestep.commands.inspected_setup import InspectedSetup, check_devices, inspect_setup
from samestep.commands.machines import detect_launched_rank, is_first
from samestep.commands.other_machines import digest_of, launch_request, options_of
from samestep.commands.progress import Training
from samestep.commands.results_folder import (
    WEIGHTS,
    finished_results,
    launch_folder,
    recorded,
    remove_stale,
    results_folder,
    words_of,
)
from samestep.commands.setup import Setup
from samestep.errors import Refused, TrainingFailed, UserError, say
from samestep.launch import Command, rendezvous_address, supervise
from samestep.launch.command import command_for, rank_command, shell_line
from samestep.launch.outer_launcher import LaunchedRank
from samestep.message import message
from samestep.records.files import read, replace_text, why_not_writable, with_schema, write
from samestep.records.inspection import DataFacts, EngineFacts, JobFacts
from samestep.records.monitor import CSV, PAGE, SUMMARY, MonitorSummary, read_samples, thinned
from samestep.records.plan import TRACES, EvaluateTask, Plan, RunTask
from samestep.records.record import Progress, Record
from samestep.records.redaction import redacted_values
from samestep.records.results import write_results
from samestep.records.run_results import EvaluateResults, InitialWeights, RunResults
from samestep.report.figures import batch_size, data_wait
from samestep.report.figures.data_wait import step_parts
from samestep.report.language import with_english
from samestep.world.network import check_master
from samestep.world.regular_files import make_named_folder

PLAN = "plan.json"  # in the folder of the ranks
Watch = Callable[[Progress], None]


def run(setup: Setup, options: RunOptions, *, dry_run: bool = False) -> RunResults | None:
    """Trains the whole job. Returns the results; None on a machine without rank 0, on other ranks of an outer launcher,
    and after a dry run, which prints the shell line that would start it.

    Where `out` holds the results of this training, they are returned, and nothing is trained.
    """
    launched = _launch("run", setup, options, dry_run)
    if launched is None or isinstance(launched, RunResults):
        return launched
    inspected, row, record, out, training = launched
    assert isinstance(training, RunTask)
    results = _train_results(inspected, row, record, out, training)
    results = with_english(replace(results, monitor=_write_usage(record, out, results)))
    _write_results(out, results)
    return results


def _write_usage(record: Record, out: Path, results: RunResults) -> str | None:
    """Writes the page of what a training used. Returns its path; None where the disk has taken no samples."""
    from samestep.report.monitor_page import monitor_page

    try:
        summary, samples = read(MonitorSummary, record.folder / SUMMARY), thinned(read_samples(record.folder / CSV))
        on_cpu = record.ranks[0].world.device == "cpu"  # on a GPU the thread that trains only hands out work
        parts = step_parts(record.training("run")) if on_cpu else []
        page = monitor_page(summary, samples, parts, results.traces)
        replace_text(out / PAGE, page)
    except (OSError, UserError):
        return None
    return str(out / PAGE)


def evaluate(setup: Setup, options: EvaluateOptions) -> EvaluateResults | None:
    """Evaluates weights. Returns the results; None on a machine without rank 0, as `run`."""
    launched = _launch("evaluate", setup, options, False)
    if launched is None or isinstance(launched, RunResults):
        return None
    inspected, row, record, _, training = launched
    assert isinstance(training, EvaluateTask)
    results = _score_results(inspected, row, record, training)
    _write_results(launched[3], results)
    return results


def _write_results(out: Path, results: RunResults | EvaluateResults) -> None:
    make_named_folder(out)  # somebody may have removed it
    write_results(results, out)


def _launch(
    command: str, setup: Setup, options: RunOptions | EvaluateOptions, dry_run: bool
) -> tuple[InspectedSetup, Row, Record, Path, RunTask | EvaluateTask] | RunResults | None:
    """Launches a training or an evaluation. Returns its record, the folder of its results and what was planned; None as
    `run`; the results of a training that has finished before."""
    rank = detect_launched_rank(os.environ, setup)
    inspected = inspect_setup(setup, rank)
    training = options.plan(inspected.job)
    out = results_folder(command, inspected, rank, options_of(training), dry_run=dry_run)
    words = words_of(command, options, setup.job)
    first = (rank is None or rank.rank == 0) and is_first(inspected.machines)
    if isinstance(training, RunTask):
        training = replace(training, weights=str(out / WEIGHTS))
        if finished := finished_results(out, training, words):
            return finished if first and not dry_run else None
    folder = launch_folder(out, inspected, rank, dry_run=dry_run)
    row, to_start, plan = prepare(inspected, training, folder, rank)
    if inspected.setup.nproc and row.facts.processes == 1 < inspected.size and (rank is None or rank.rank == 0):
        say(message("engine_trains_on_one_rank", engine=row.engine, nproc=inspected.setup.nproc))
    if dry_run:
        print(f"{_line_that_writes(folder / PLAN, plan)} && {shell_line(to_start)}")
        return None
    write(folder / PLAN, plan)
    with recorded(out, words, writes=first):
        record = _supervised(command, inspected, row, to_start=to_start, folder=folder, out=out, rank=rank)
    if record.ranks[0].rank == 0:
        return inspected, row, record, out, training
    if rank is None:
        say(message("ranks_of_this_machine_have_ended", folder=folder))
    return None


def _supervised(
    command: str,
    inspected: InspectedSetup,
    row: Row,
    to_start: Command,
    folder: Path,
    out: Path,
    rank: LaunchedRank | None,
) -> Record:
    """Runs a launch, and shows its progress. Raises UserError where its folder takes no files at its end."""
    first = rank is None or rank.rank == 0
    if command == "run" and first:
        say_divisions(inspected, [row])
        _say_batch_size(inspected, row)
    samples = command == "run" and first
    with Training(f"{inspected.setup.job} on {row.engine}", folder, row.launcher, first=first) as progress:
        try:
            return _supervise(
                inspected, row, to_start, folder, progress.show, one_rank=rank is not None, samples=samples
            )
        except TrainingFailed as error:
            if (why := why_not_writable(folder)) is None:
                raise
            raise UserError(_what_is_lost(out, folder, why)) from error


def _what_is_lost(out: Path, folder: Path, why: str) -> str:
    """Returns the sentence about a launch that could not write how it ended."""
    weights = out / WEIGHTS
    outcome = f"the latest weights that could be are in {weights}" if weights.exists() else "the weights are lost"
    return f"the ranks cannot write into {folder} ({why}): {outcome}; free some disk space, or choose another --out"


def _say_batch_size(inspected: InspectedSetup, row: Row) -> None:
    job, ranks = inspected.job, row.facts.replicas
    say(batch_size.one_step(job.data.global_batch, ranks, job.data.micro_batches.get(ranks, 1)))
    advice = batch_size.advice(job.settings, job.chosen, job.optimizer.name)
    if advice:
        say(advice)


def prepare(
    inspected: InspectedSetup, training: RunTask | EvaluateTask, folder: Path, rank: LaunchedRank | None = None
) -> tuple[Row, Command, Plan]:
    """Returns the row, the command and the plan of one training or evaluation that writes into `folder`; starts and
    writes nothing.

    rank: of this command, where an outer launcher has started it: the command then becomes that rank. Raises UserError
    when the engine cannot run.
    """
    setup, machines = inspected.setup, inspected.machines
    check_devices(inspected.nproc, inspected.inspection, setup.engines)
    check_master(machines.master, machines.nnodes)
    rendezvous_address.check_port(machines)
    (row,) = rows_of(inspected)
    if row.verdict and row.verdict.verdict == "unavailable":
        raise UserError(message("engine_cannot_run_here", engine=row.engine, why=row.verdict.reason))
    if row.verdict and row.verdict.verdict == "refused":
        raise Refused(row.verdict.reason or "")
    check_options(machines, row.launcher)
    check_fewer_machines(inspected)
    possible = launch.launchers_for(row.facts.process_kind)
    if isinstance(training, RunTask) and training.spot_check:
        check_can_spot_check(row.facts, inspected.job)
    if isinstance(training, RunTask) and training.on_nan == "skip":
        check_can_skip(row.facts, inspected.job)
    if rank and rank.launcher not in possible:
        raise UserError(
            f"{rank.launcher} has started {rank.size} processes, and {row.engine} starts with {' or '.join(possible)}; "
            f"run it without {rank.launcher}"
        )
    identity = (str(folder), time.time(), setup.job, setup.settings, row.engine, row.facts.settings, (training,))
    threads, request = (setup.machines.planned_threads, inspected.nproc), launch_request(inspected, training)
    plan = Plan(*identity, *threads, asked=request, mesh=row.facts.mesh)
    machines = replace(machines, request_digest=digest_of(request))
    if rank:
        row.launcher = rank.launcher
        return row, rank_command(folder / PLAN, rank, row.facts.devices, machines), plan
    nproc = row.facts.processes // machines.nnodes
    return row, command_for(folder / PLAN, row.launcher, nproc, row.facts.devices, machines), plan


def _line_that_writes(path: Path, plan: Plan) -> str:
    """Returns a plan as a shell line that writes it to its file."""
    folder, text = shlex.quote(str(path.parent)), shlex.quote(json.dumps(with_schema(plan)))
    return f"mkdir -p {folder} && printf %s {text} > {shlex.quote(str(path))}"


def check_options(machines: launch.Machines, launcher: str) -> None:
    """Raises UserError for an option that `launcher` does not have, and another launcher has."""
    for option, flag in (("min_nodes", "--nnodes MIN:MAX"), ("max_restarts", "--max-restarts"), ("hosts", "--hosts")):
        having = launch.launchers_with(option)
        if getattr(machines, option) and launcher not in having:
            raise UserError(
                f"{flag} is an option of {' and '.join(having)}, and {launcher} starts this "
                f"training; leave it out, or add --launcher {having[0]}"
            )


def check_can_spot_check(engine: EngineFacts, job: JobFacts) -> None:
    """Raises Refused for an engine, and for a job, whose steps are not replayed in one process."""
    if engine.no_spot_checks:
        raise Refused(message("engine_cannot_spot_check", why=engine.no_spot_checks))
    if job.optimizer.needs_closure:
        raise Refused(message("optimizer_cannot_spot_check", optimizer=job.optimizer.name))


def check_can_skip(engine: EngineFacts, job: JobFacts) -> None:
    """Raises Refused for an engine, and for a job, that cannot leave a step out."""
    if engine.cannot_skip:
        raise Refused(message("engine_cannot_skip_steps", why=engine.cannot_skip))
    if job.optimizer.needs_closure:
        raise Refused(message("optimizer_cannot_skip_steps", optimizer=job.optimizer.name))
    if job.carry_state:
        raise Refused(message("carried_state_cannot_skip_steps"))


def check_fewer_machines(inspected: InspectedSetup) -> None:
    """Raises Refused where machines may leave, and the job cannot be trained on the ranks that are left."""
    machines, job = inspected.machines, inspected.job
    if machines.min_nodes and job.carry_state:
        raise Refused(
            "carry_state=True: the state that rows carry belongs to the rows of each rank, so no machine may leave or "
            f"join in the middle of an epoch; give --nnodes {machines.nnodes}"
        )
    for count in range(machines.min_nodes or machines.nnodes, machines.nnodes):
        ranks = count * inspected.nproc
        if why := job.refusals.of_replicas[ranks]:
            raise Refused(
                f"--nnodes {machines.min_nodes}:{machines.nnodes} allows {ranks} rank{'s' if ranks > 1 else ''}, on "
                f"which this job cannot train: {why}"
            )


def _supervise(
    inspected: InspectedSetup, row: Row, command: Command, folder: Path, watch: Watch, *, one_rank: bool, samples: bool
) -> Record:
    """Runs a launch and returns its record. one_rank: this command is one rank of an outer launcher. samples: what the
    launch uses is written into `folder`."""
    remove_stale(folder)
    machines = inspected.machines
    size = 1 if one_rank else ranks_in_folder(inspected, row.facts.processes)
    return supervise.run(
        command,
        folder,
        size,
        deadline_s=inspected.setup.deadline_s,
        stall_s=inspected.setup.stall_s,
        watch=watch,
        machines=machines,
        graceful=launch.load(row.launcher).gets_signals,
        ends_by=_ends_by(machines, one_rank=one_rank),
        samples_usage=samples,
    )


def _ends_by(machines: launch.Machines, *, one_rank: bool) -> tuple[signal.Signals, ...]:
    """Returns the signals that end this command's part of a training at once."""
    if machines.min_nodes:
        return signal.SIGTERM, signal.SIGHUP  # a machine that is asked to end leaves the others, which train on
    return (signal.SIGTERM,) if one_rank else ()


def ranks_in_folder(inspected: InspectedSetup, processes: int) -> int:
    """Returns how many of a launch's processes write into this machine's folder."""
    machines = inspected.machines
    return processes // (1 if machines.single_launch else machines.nnodes)  # else each machine has a folder of its own


def _train_results(inspected: InspectedSetup, row: Row, record: Record, out: Path, step: RunTask) -> RunResults:
    observations = record.training("run")[0]
    best: Mapping[str, float] = observations.curve[observations.best_at] if observations.best_at >= 0 else {}
    wait = measure_data_wait(inspected.job.data, record)
    at_step = best.get("step")
    return RunResults(
        job=inspected.setup.job,
        settings=redacted_values(inspected.setup.settings),
        launcher=row.launcher,
        world_size=record.ranks[0].world.size if inspected.machines.min_nodes else ranks_of(row),
        threads_per_rank=record.ranks[0].threads,
        engine=row.engine,
        engine_settings=row.facts.chosen,
        global_batch=inspected.job.data.global_batch,
        init=InitialWeights(step.init, str(step.init_sha256)) if step.init else None,
        steps=observations.resumed_from + len(observations.step_s),
        resumed_from=observations.resumed_from,
        asked_steps=observations.asked_steps or 0,
        stopped=observations.stopped,
        seconds=sum(observations.step_s),
        skipped_steps=observations.skipped_steps,
        final_loss=observations.losses[-1] if observations.losses else None,
        curve=observations.curve,
        weights_of_step=None if at_step is None else int(at_step),
        evaluation={name: value for name, value in best.items() if name != "step"} or None,
        evaluation_rows=count_evaluated_rows(record, "run", inspected.job.evaluation.rows),
        weights=str(out / WEIGHTS),
        export=step.export,
        wait_share=wait.share if wait else None,
        loader_ceiling=wait.loader_ceiling if wait else None,
        demand=wait.demand if wait else None,
        advice=wait.advice() if wait else None,
        traces=_traces(out, record, step) if step.profile else (),
        changes=observations.changes,
        spot_checks=observations.spot_checks,
    )


def _traces(out: Path, record: Record, step: RunTask) -> tuple[str, ...]:
    """Returns the files of --profile that this launch has written, of all ranks whose folders are here."""
    assert step.profile
    began = record.plan().started_at - 1  # a file system may round times
    traces = [path for path in sorted(out.glob(f"**/{TRACES}/steps*.json.gz")) if path.stat().st_mtime >= began]
    if not traces:
        say(message("profiled_steps_were_not_taken", first=step.profile[0], last=step.profile[1]))
    return tuple(map(str, traces))


def ranks_of(row: Row) -> int:
    """Returns the ranks that train: its processes, or the replicas of the one process."""
    return max(row.facts.processes, row.facts.replicas)


def _score_results(inspected: InspectedSetup, row: Row, record: Record, step: EvaluateTask) -> EvaluateResults:
    evaluation = record.training("evaluate")[0].evaluation
    assert evaluation is not None
    return EvaluateResults(
        job=inspected.setup.job,
        settings=redacted_values(inspected.setup.settings),
        launcher=row.launcher,
        world_size=ranks_of(row),
        weights=step.init,
        sha256=step.init_sha256,
        evaluation=evaluation.means,
        evaluation_rows=count_evaluated_rows(record, "evaluate", inspected.job.evaluation.rows),
        predictions=step.predictions,
    )


def count_evaluated_rows(record: Record, training: str, rows: int) -> int:
    """Returns `rows`, after a check that the record has each row once. Raises TrainingFailed when it has not."""
    ranks = [rank.evaluation for rank in record.training(training)]
    indices = sorted(index for of_rank in ranks if of_rank for index in of_rank.indices)
    complete = len(ranks) == record.ranks[0].world.size  # other machines' records may be in other folders
    if rows and complete and indices != list(range(rows)):
        raise TrainingFailed(f"the evaluation saw {len(indices)} rows of {rows}, not each once: {record.folder}")
    return rows


def measure_data_wait(data: DataFacts, record: Record) -> data_wait.Waiting | None:
    """Measures the wait for data: its share of the time, the loader's rows per second, and what would help."""
    first = record.ranks[0]
    cores = first.machine.cores / first.world.local_size
    return data_wait.measured(
        record.training("run"), data.global_batch, data.workers, data.prefetch, cores, data.most_workers
    )
