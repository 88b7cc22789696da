"""check: runs a user's own script on several ranks with a recorder attached, and judges what it recorded."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from samestep import launch
from samestep.commands.check_by_hand import judged_by_hand
from samestep.commands.check_replay import replay, with_modules
from samestep.commands.command_options import CHECK_LAUNCHERS, MOST_STEPS, STEPS, CheckOptions
from samestep.commands.failed_check import with_lines
from samestep.commands.fix import try_patches
from samestep.commands.options import flag_of, why_no_path
from samestep.commands.results_folder import prepare
from samestep.commands.setup import check_rank_number
from samestep.commands.user_sources import declared_in, meant_by, read_sources
from samestep.errors import ObservationFailed, TrainingFailed, UserError, say
from samestep.judge import judge, with_coefficients, with_replay, with_sites
from samestep.judge.against_one_process import not_replayed
from samestep.judge.coefficients import one_process_decides
from samestep.judge.first_module import OF_A_MODULE
from samestep.judge.layout import Layout
from samestep.judge.sites import files_of
from samestep.judge.steps_apart import OF_STEPS_APART, why_met_apart
from samestep.judge.updates import ended_apart, left_behind, unequal_calls, why_unequal_calls
from samestep.launch import Command, Machines, fork_client, supervise
from samestep.launch.command import command_for
from samestep.message import Message, message
from samestep.records.files import read, write
from samestep.records.findings import CheckResults
from samestep.records.launch_files import OF_RANKS
from samestep.records.record import RankError, Record
from samestep.records.redaction import redacted, typed_command
from samestep.records.results import RESULTS
from samestep.records.runs import ResultsIdentity
from samestep.records.script import CLOSURES, STEP, UNFINISHED, ClosureRecord, ScriptRecord
from samestep.records.script_plan import PLAN, ScriptPlan
from samestep.report.language import with_english
from samestep.version import __version__
from samestep.world import RankVariables, become_worker
from samestep.world.regular_files import paths_in, remove_file

REPLAY_FACTOR, REPLAY_LEAST_S = 10, 60.0  # how long a replay may take: so many times the recording, and at least
SEED = 1_905_683_417  # a number with which hardly any script seeds


def check(options: CheckOptions, words: Sequence[str]) -> CheckResults:
    """Runs a script until its steps are recorded, and judges them.

    words: the script's path and its arguments; or a command that starts `options.nproc` ranks, as torchrun does.

    Raises UserError for a script that is not there, and TrainingFailed for one that fails.
    """
    command, script, arguments = words_of(options, words)
    if options.out and (options.out / PLAN).exists():
        raise UserError(f"{options.out} holds the record of another check; give another folder with --out")
    folder = prepare_folder(options, script, arguments)
    keep = options.replay and options.nproc > 1
    plan = ScriptPlan(
        out=str(folder),
        started_at=time.time(),
        script=script,
        arguments=tuple(arguments),
        steps=options.steps or STEPS,
        most_steps=0 if options.steps or not options.replay else MOST_STEPS,
        keep=keep,
        module=options.module,
        meant=meant_by(options.meant, "--meant"),
        # A record without a replay is made to be compared with another one.
        weights=not options.replay,
        seed=None if options.replay else SEED,
        as_cpu=bool(options.as_cpu),
    )
    try:
        plan, ranks, record = record_script(options, plan, command)
        sources = read_sources(files_of(ranks))

        plan = replace(plan, meant=plan.meant or declared_in(sources))
        results = judge(plan, ranks, record, typed_command())
        results = with_coefficients(results, ranks, sources)
        if any(finding.message.id in OF_STEPS_APART for finding in results.findings):
            results = with_replay(results, [not_replayed(message("ranks_step_apart"))])
        elif keep and Layout.of(ranks).kind != "pipeline":  # whose chain of stages is played, and judged, already
            # What the ranks tell is kept, whatever becomes of the replay.
            write(folder / RESULTS, with_english(with_replay(results, [not_replayed(message("replay_goes_on"))])))
            say(message("replay_begins", steps=len(ranks[0].steps), folder=folder))
            try:
                results = _replayed(results, options, plan, ranks, record)
            except (KeyboardInterrupt, SystemExit):
                results = with_replay(results, [not_replayed(message("replay_was_interrupted"))])
                options = replace(options, fix=False)
    finally:
        fork_client.close()
    results = with_sites(results, ranks, sources, Path.cwd())
    if options.fix:
        current_folder = Path.cwd()

        def again(copy: Path, out: Path) -> CheckResults:
            moved = [
                str(copy / Path(word).relative_to(current_folder))
                if Path(word).is_relative_to(current_folder)
                else word
                for word in words
            ]
            return check(replace(options, out=out, fix=False), moved)

        results = replace(results, fixes=try_patches(results, ranks, plan, again))
    results = with_english(results)
    write(folder / RESULTS, results)
    return results


def _replayed(
    results: CheckResults, options: CheckOptions, plan: ScriptPlan, ranks: Sequence[ScriptRecord], record: Record
) -> CheckResults:
    """Returns results with the answers of a replay in one process, which may take a multiple of the recording's own
    time."""
    limit_s = max(REPLAY_LEAST_S, REPLAY_FACTOR * (time.time() - plan.started_at))
    limited = replace(options, deadline_s=min(limit_s, options.deadline_s or limit_s))

    def play(replay_folder: Path) -> Record:
        began = time.monotonic()
        try:
            return _run(limited, replay_folder, 1)
        except TrainingFailed as error:
            if time.monotonic() - began < limit_s:
                raise
            raise TrainingFailed(message("replay_took_too_long", seconds=round(limit_s))) from error

    if by_hand := judged_by_hand(results, plan, ranks, record, play):
        return by_hand
    if results.answer == "differs" and not one_process_decides(results.findings):
        if any(finding.message.id in OF_A_MODULE for finding in results.findings):
            replay(plan, ranks, record, play)
            results = replace(results, findings=with_modules(results.findings, plan, ranks))
        return with_replay(results, [not_replayed(message("ranks_differ_by_themselves"))])
    return with_replay(results, replay(plan, ranks, record, play))


def words_of(options: CheckOptions, words: Sequence[str]) -> tuple[Sequence[str] | None, str, list[str]]:
    """Returns (the command that starts the ranks, or None; the script, or the command's first word; the arguments).

    Raises UserError for a script that is not there, and for options that cannot be.
    """
    if why := why_no_path(words[0]):
        raise UserError(f"SCRIPT {words[0][:80] or repr('')}: {why}")
    command = words if not options.module and is_command(words) else None
    script, arguments = (words[0], [*words[1:]]) if command or options.module else _script_of(words)
    if options.launcher not in CHECK_LAUNCHERS:
        raise UserError(f"--launcher {options.launcher!r}: a script is started by {' or '.join(CHECK_LAUNCHERS)}")
    if not command:
        _say_misplaced(arguments)
    check_rank_number("--nproc", options.nproc)
    _refuse_ranks()
    return command, script, arguments


def prepare_folder(options: CheckOptions, script: str, arguments: Sequence[str]) -> Path:
    """Creates the folder of a check's records and results."""
    training = shlex.join([*redacted(arguments), f"at {time.time()}"])  # each has a folder of its own
    return prepare(
        options.out,
        ResultsIdentity("check", script, __version__, options.nproc, steps=options.steps or STEPS, training=training),
    )


def record_script(
    options: CheckOptions, plan: ScriptPlan, command: Sequence[str] | None, python: str = sys.executable
) -> tuple[ScriptPlan, list[ScriptRecord], Record]:
    """Runs a plan's script until its steps are recorded. command: as of words_of; python: that runs the ranks.

    The fork server that a launch may have started still runs: who calls this closes it.
    """
    folder = Path(plan.out)
    write(folder / PLAN, plan if command is None else replace(plan, script="", ranks=options.nproc))
    try:
        record = _run(options, folder, options.nproc, command, python)
    except TrainingFailed:
        if options.as_cpu is False or plan.as_cpu or not _needs_gpus(folder):
            raise
        say(message("recorded_again_on_cpus"))
        for path in paths_in(folder, "*"):
            if OF_RANKS.fullmatch(path.name):
                remove_file(path)
        return record_script(options, replace(plan, as_cpu=True), command, python)
    plan = read(ScriptPlan, folder / PLAN)  # the record that a command's ranks complete
    return plan, [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(options.nproc)], record


def _needs_gpus(folder: Path) -> bool:
    """Returns whether a rank has failed for lack of a GPU."""
    return any(read(RankError, path).message.id == "script_needs_gpus" for path in paths_in(folder, "error-rank*.json"))


def _refuse_ranks() -> None:
    """Raises UserError where a launcher has started this command as one of its ranks."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UserError(
            "samestep check starts the ranks itself, and RANK and WORLD_SIZE are set here; type samestep check -- "
            "torchrun … train.py, not the other way round, or unset RANK and WORLD_SIZE"
        )


def _script_of(words: Sequence[str]) -> tuple[str, list[str]]:
    script, *arguments = words
    if not Path(script).is_file():
        kind = "is a folder" if Path(script).is_dir() else "does not exist"
        raise UserError(f"{script} {kind}; give the path of the script, as in samestep check --nproc 2 train.py")
    return script, arguments


def _run(
    options: CheckOptions,
    folder: Path,
    nproc: int,
    words: Sequence[str] | None = None,
    python: str = sys.executable,
) -> Record:
    machines = Machines()
    if words:
        try:
            return _supervise(recorded(words, folder, nproc), options, folder, nproc)
        except TrainingFailed as error:
            if paths_in(folder, "pid-rank*"):
                raise
            why = message("command_started_no_rank", command=words[0], ranks=nproc, error=error.message)
            raise TrainingFailed(why) from None
    command = command_for(folder / PLAN, options.launcher, nproc, ("cpu",), machines)
    if options.launcher == launch.FORK and python == sys.executable:
        fork_client.start("ranks")
    elif python != sys.executable:
        argv = tuple(python if word == sys.executable else word for word in command.argv)
        command = replace(command, argv=argv, fork=None)
    return _supervise(command, options, folder, nproc)


def is_command(words: Sequence[str]) -> bool:
    """Returns whether the words of the command line are a command, and not a Python script with its arguments."""
    return not words[0].endswith(".py") and shutil.which(words[0]) is not None


def recorded(words: Sequence[str], folder: Path, nproc: int) -> Command:
    """Returns a command whose ranks run the plan in a folder, each with the script that the command gives it."""
    env = become_worker.install(folder, os.environ) | {become_worker.PLAN: str(folder / PLAN)}
    env |= {become_worker.LAUNCHERS: json.dumps(rank_variables(os.environ, nproc))}
    # The launcher is not known.
    return Command(tuple(words), env, signal.SIGTERM, launchers=tuple(launch.names()))


def rank_variables(env: Mapping[str, str], nproc: int) -> list[tuple[RankVariables, dict[str, str | None], int]]:
    """Returns the value of become_worker.LAUNCHERS. Fewer processes than ranks may be torchruns."""
    launchers: dict[RankVariables, tuple[RankVariables, dict[str, str | None], int]] = {}
    # Several launchers use torchrun's variables.
    for launcher in launch.all_launchers().values():
        inherited = {name: env.get(name) for name in (*launcher.variables, *launcher.saved_variables)}
        starts_torchrun = launcher.environment is not None and launcher.environment.starts_torchrun
        launchers.setdefault(launcher.variables, (launcher.variables, inherited, nproc if starts_torchrun else 1))
    return [*launchers.values()]


def _say_misplaced(arguments: Sequence[str]) -> None:
    """Says that an option of check stands among the script's arguments."""
    options = {flag_of(CheckOptions, field.name) for field in fields(CheckOptions)}
    if first := next((argument for argument in arguments if argument.partition("=")[0] in options), None):
        say(message("option_comes_after_the_script", option=first))


def _supervise(command: Command, options: CheckOptions, folder: Path, nproc: int) -> Record:
    try:
        return supervise.run(command, folder, nproc, deadline_s=options.deadline_s, stall_s=options.stall_s)
    except ObservationFailed:
        raise
    except TrainingFailed as error:
        why = _why_unequal(folder, nproc) or error.message
        raise TrainingFailed(with_lines(why, folder, nproc)) from error


def _why_unequal(folder: Path, nproc: int) -> Message | None:
    """Returns why ranks that do not step alike have lost each other; None where that is not why a launch failed."""
    paths = [folder / CLOSURES.format(rank) for rank in range(nproc)]
    called = [read(ClosureRecord, path) for path in paths if path.exists()]
    if len(called) == nproc and (step := unequal_calls(called)) is not None:
        return why_unequal_calls(called, step)
    record = Record(folder)
    error = record.error()
    if error is None or not error.lost_peer:
        return None
    taken = [len(paths_in(folder, f"rank{rank}.{STEP.format('*')}.npz")) for rank in range(nproc)]
    written = record.written()
    records = {rank: read(ScriptRecord, folder / f"rank{rank}.json") for rank in written}
    unfinished = {rank: folder / UNFINISHED.format(rank) for rank in range(nproc) if rank not in records}
    records_of_all = {
        **records,
        **{rank: read(ScriptRecord, path) for rank, path in unfinished.items() if path.exists()},
    }
    met = [[n for n, step in enumerate(records_of_all[rank].steps) if step.begun] for rank in sorted(records_of_all)]
    if len(met) == nproc and all(met) and (why := why_met_apart([steps[0] for steps in met])):
        return why
    taken = [len(records[rank].steps) if rank in records else steps for rank, steps in enumerate(taken)]
    ended_itself = [rank for rank, ended in records.items() if ended.ended == "itself"]
    left = {rank: ended.left for rank, ended in records.items()}
    return ended_apart(taken, ended_itself, left) or left_behind(taken, written)
