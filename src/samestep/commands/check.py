"""check: runs a user's own script on several ranks with a recorder attached, and judges what it recorded."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from samestep import launch
from samestep.commands.check_command import is_command, recorded
from samestep.commands.check_options import LAUNCHERS, CheckOptions
from samestep.commands.check_replay import replay
from samestep.commands.options import flag_of, why_no_path
from samestep.commands.results_folder import prepare
from samestep.errors import TrainingFailed, UserError, say
from samestep.launch import Command, Machines, fork_client, supervise
from samestep.launch.command import command_for
from samestep.proof.script import judge, with_replay
from samestep.proof.script.closures import cause_of, left_behind, unequal_calls
from samestep.proof.script.replay import not_replayed
from samestep.records.files import read, write
from samestep.records.record import Record
from samestep.records.redaction import redacted, typed_command
from samestep.records.results import RESULTS
from samestep.records.runs import ResultsIdentity
from samestep.records.script import CLOSURES, PLAN, STEP, CheckResults, ClosuresSeen, ScriptPlan, ScriptRecord
from samestep.version import __version__


def check(options: CheckOptions, words: Sequence[str]) -> CheckResults:
    """Runs a script until its steps are recorded, and judges them.

    words: the script's path and its arguments; or a command that starts `options.nproc` ranks, as torchrun does.

    Raises UserError for a script that is not there, and TrainingFailed for one that fails.
    """
    if why := why_no_path(words[0]):
        raise UserError(f"SCRIPT {words[0][:80] or repr('')}: {why}")
    command = words if not options.module and is_command(words) else None
    script, arguments = (words[0], [*words[1:]]) if command or options.module else _script_of(words)
    if options.launcher not in LAUNCHERS:
        raise UserError(f"--launcher {options.launcher!r}: a script is started by {' or '.join(LAUNCHERS)}")
    if not command:
        _say_misplaced(arguments)
    cores = os.cpu_count() or 1
    if options.nproc > 64 * cores:
        raise UserError(f"--nproc {options.nproc}: this machine has {cores} cores; give at most 64 ranks for each")
    _refuse_ranks()
    if options.out and (options.out / PLAN).exists():
        raise UserError(f"{options.out} holds the record of another check; give another folder with --out")
    training = shlex.join([*redacted(arguments), f"at {time.time()}"])  # each has a folder of its own
    folder = prepare(
        options.out,
        ResultsIdentity("check", script, __version__, options.nproc, steps=options.steps, training=training),
    )
    keep = options.replay and options.nproc > 1
    plan = ScriptPlan(str(folder), time.time(), script, tuple(arguments), options.steps, keep, module=options.module)
    write(folder / PLAN, plan if command is None else replace(plan, script="", ranks=options.nproc))
    try:
        record = _run(options, folder, options.nproc, command)
        plan = read(ScriptPlan, folder / PLAN)  # which a command's ranks complete
        ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(options.nproc)]
        results = judge(plan, ranks, record, typed_command())
        if keep and results.answer == "differs":
            results = with_replay(results, [not_replayed("the ranks by themselves differ")])
        elif keep:
            findings = replay(plan, ranks, record, lambda to: _run(options, to, 1))
            results = with_replay(results, findings)
    finally:
        fork_client.close()
    write(folder / RESULTS, results)
    return results


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


def _run(options: CheckOptions, folder: Path, nproc: int, words: Sequence[str] | None = None) -> Record:
    machines = Machines()
    if words:
        try:
            return _supervise(recorded(words, folder, nproc), options, folder, nproc)
        except TrainingFailed as error:
            if list(folder.glob("pid-rank*")):
                raise
            raise TrainingFailed(
                f"{words[0]} has started no rank: a Python script, where samestep is installed, with RANK in its "
                f"environment, or one of {nproc} processes of mpirun or srun (--nproc); give a command such as "
                f"torchrun, or the script itself; {error}"
            ) from None
    command = command_for(folder / PLAN, options.launcher, nproc, ("cpu",), machines)
    if options.launcher == launch.FORK:
        fork_client.start("ranks")
    return _supervise(command, options, folder, nproc)


def _say_misplaced(arguments: Sequence[str]) -> None:
    """Says that an option of check stands among the script's arguments."""
    own = {flag_of(CheckOptions, each.name) for each in fields(CheckOptions)}
    if first := next((each for each in arguments if each.partition("=")[0] in own), None):
        say(f"{first} comes after the script and goes to it; options of samestep check stand before the script")


def _supervise(command: Command, options: CheckOptions, folder: Path, nproc: int) -> Record:
    try:
        return supervise.run(command, folder, nproc, deadline_s=options.deadline_s, stall_s=options.stall_s)
    except TrainingFailed as error:
        if why := _why_unequal(folder, nproc):
            raise TrainingFailed(why) from error
        raise


def _why_unequal(folder: Path, nproc: int) -> str:
    """Returns why ranks that do not step alike have lost each other; '' where that is not why a launch failed."""
    paths = [folder / CLOSURES.format(rank) for rank in range(nproc)]
    called = [read(ClosuresSeen, path) for path in paths if path.exists()]
    if len(called) == nproc and (step := unequal_calls(called)) is not None:
        return cause_of(called, step)
    record = Record(folder)
    error = record.error()
    if error is None or not error.lost_peer:
        return ""
    taken = [len([*folder.glob(f"rank{rank}.{STEP.format('*')}.npz")]) for rank in range(nproc)]
    return left_behind(taken, record.written())
