"""Runs a user's script in this rank's process, as `python script.py` would, with the recorder attached."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from samestep.as_cpu import replaced
from samestep.as_cpu.absent_gpus import AbsentGpus
from samestep.errors import TrainingFailed, UserError
from samestep.job.foreign import is_a
from samestep.message import message
from samestep.rank import flight_recorder
from samestep.rank.step import is_unused_error, unused_message
from samestep.recorder.evaluations import ENTRIES
from samestep.recorder.guards import fault_record, recorder_guard
from samestep.recorder.leaving import described
from samestep.recorder.pipeline_replay import replay_pipeline
from samestep.recorder.random_numbers import seed_anew
from samestep.recorder.recorder import Recorder
from samestep.recorder.redirected_writes import RedirectedWrites
from samestep.recorder.replay_player import ReplayPlayer
from samestep.recorder.replay_saver import ReplaySaver
from samestep.recorder.spawned_ranks import patch_spawned_ranks
from samestep.records.files import naming_full_disks, write
from samestep.records.record import RankRecord
from samestep.records.script import UNFINISHED, ScriptRecord
from samestep.records.script_plan import PLAN, REPLAYED, ReplayRecord, ScriptPlan
from samestep.world import World
from samestep.world.become_worker import SCRIPT
from samestep.world.imports import forget_hidden_modules
from samestep.world.processes import end_children
from samestep.world.regular_files import remove_file

LEAVE_S, LEAVE_STEPS = 10.0, 5  # how long a rank waits for the others' last step: seconds, or so many of its steps


def run_script(plan: ScriptPlan, record: RankRecord) -> NoReturn:
    """Runs the script until it ends by itself, writes the record of its steps, and ends this process.

    After the last step that was asked the process ends, inside that step: no line of the script runs after it.
    """
    folder = Path(plan.out)
    if plan.as_cpu:
        from samestep import as_cpu  # here: most scripts need none of it

        as_cpu.attach()
    flight_recorder.enable(ENTRIES)
    plan = _completed(plan, record.world)
    played: ReplayPlayer | None = None
    saver: ReplaySaver | None = None

    def enough(script_record: ScriptRecord) -> NoReturn:
        with naming_full_disks():
            if saver:
                saver.write()
                write_stages()
            if played:
                write(folder / REPLAYED, played.result())
        leave(script_record)

    def enough_by_itself() -> None:
        enough(recorder.record("itself"))

    def write_stages() -> None:
        recorder.pipelines.write()
        replay_pipeline(recorder.pipelines, folder, record.world)

    def leave(script_record: ScriptRecord) -> NoReturn:
        if plan.as_cpu:
            script_record.notes.insert(0, replaced.described())
        with naming_full_disks():
            remove_file(folder / f".room-rank{script_record.rank}")  # room on the disk that the worker has kept
            write(folder / f"rank{script_record.rank}.json", script_record)
        _wait_for_others(folder, script_record)
        _exit(0)

    recorder_guard.begin(lambda fault: _leave_with_fault(fault, folder, record.world.rank))
    recorder = Recorder(plan, record.world, enough)
    if plan.keep:
        saver = ReplaySaver(recorder, folder, record.world)
    if plan.replay:

        def stop(result: ReplayRecord) -> NoReturn:
            write(folder / REPLAYED, result)
            # The record asks the script's samplers, which draw: nothing is fed to them any more.
            recorder.hooks.detach()
            leave(recorder.record("itself"))

        os.chdir(plan.replay.work)
        elsewhere = Path(plan.replay.elsewhere)
        RedirectedWrites([Path(plan.replay.record), elsewhere.parent], elsewhere).attach(recorder.hooks)
        played = ReplayPlayer(recorder, plan.replay, stop)
        played.attach()
    if saver:
        saver.attach()
    recorder.group_operations.attach(recorder.hooks)
    recorder.attach()
    flight_recorder.serve_with_group(recorder.hooks, folder, record.world.rank)
    # Other random numbers on each rank, as of processes that a script does not seed.
    seed = None if plan.seed is None else plan.seed + record.world.rank
    patch_spawned_ranks(recorder.hooks, record.world, played, seed)
    seed_anew(seed)  # a forked rank has the random state of all others
    _run_to_its_end(plan, recorder, folder)
    recorder_guard.hook(enough_by_itself)()
    os._exit(1)


def _exit(code: int) -> NoReturn:
    """Ends this process, and what it has started."""
    flight_recorder.end()
    end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_fault(fault: Exception, folder: Path, rank: int) -> NoReturn:
    """Writes down samestep's own exception, or that the disk is full, and ends this process."""
    try:
        failed = fault_record(fault, rank)
        with suppress(type(fault)):
            try:
                with naming_full_disks():
                    raise fault
            except UserError as error:
                failed = replace(failed, kind="user", message=error.message)
        remove_file(folder / f".room-rank{rank}")
        write(folder / f"error-rank{rank}.json", failed)
        sys.stderr.write(failed.traceback)
    finally:
        _exit(1)


@contextmanager
def _recording_a_failure(recorder: Recorder, folder: Path) -> Iterator[None]:
    """Writes what has been recorded where the block raises: the lines that called torch tell where the cause is."""
    try:
        yield
    except Exception:
        with suppress(Exception):  # the error of the script is reported
            record = recorder.record("itself")
            write(folder / UNFINISHED.format(record.rank), record)
        raise


def _run_to_its_end(plan: ScriptPlan, recorder: Recorder, folder: Path) -> None:
    """Runs a script. Raises TrainingFailed where it ends itself with an error, or lacks GPUs: then CPUs may stand for
    them."""
    absent_gpus = AbsentGpus()
    if not plan.replay:
        absent_gpus.attach(recorder.hooks)
    try:
        with _recording_a_failure(recorder, folder):
            _run(plan)
    except (Exception, SystemExit) as error:
        if is_a(error, SystemExit):
            recorder.leaving.left(error)
            if error.code in (None, 0) and not absent_gpus.explain(error, len(recorder.steps)):
                return
        why = _why_ended(error, plan, recorder, absent_gpus)
        if why is error:
            raise
        raise why from error
    if absent_gpus.explain(None, len(recorder.steps)):
        raise TrainingFailed(message("script_needs_gpus", error=message("no_step_was_taken")))


def _why_ended(
    error: Exception | SystemExit, plan: ScriptPlan, recorder: Recorder, absent_gpus: AbsentGpus
) -> BaseException:
    """Returns the exception that tells why a script has ended: its own, or one with a sentence."""
    if absent_gpus.explain(error, len(recorder.steps)):
        return TrainingFailed(message("script_needs_gpus", error=described(error)))
    if is_a(error, SystemExit):
        return TrainingFailed(message("script_left_by_exit", script=plan.script, how=recorder.leaving.reason))
    if is_a(error, RuntimeError) and is_unused_error(error):
        return TrainingFailed(unused_message(error, recorder.parameters.of_last_ddp()))
    return error


def _run(plan: ScriptPlan) -> None:
    """Runs a script, or a module of the working directory, as __main__."""
    sys.argv = [plan.script, *plan.arguments]
    # The script may choose how processes start, once.
    multiprocessing.set_start_method(None, force=True)
    if not plan.module:
        folder = Path(plan.script).resolve().parent
        sys.path.insert(0, str(folder))
        forget_hidden_modules(folder)
        # __file__ is absolute, as of python.
        names = runpy.run_path(str(Path(plan.script).absolute()), run_name="__main__")
        _keep_classes(names)
        return
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(plan.script)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise UserError(f"there is no module {plan.script}; run the command in the folder that holds its package")
    _keep_classes(runpy.run_module(plan.script, run_name="__main__", alter_sys=True))


def _keep_classes(names: dict[str, Any]) -> None:
    """Lets pickle find the classes of a script that has ended: those of what its loaders have read."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"]).update(names)


def _completed(plan: ScriptPlan, world: World) -> ScriptPlan:
    """Takes the script from the environment where a command has started this rank. Rank 0 writes it into the plan."""
    if SCRIPT not in os.environ:
        return plan
    if world.size != plan.ranks:
        raise UserError(f"the command starts {world.size} ranks; give samestep check --nproc {world.size}")
    words = json.loads(os.environ[SCRIPT])
    module = words[0] == "-m"
    script, *arguments = words[module:]
    plan = replace(plan, script=script, arguments=tuple(arguments), module=module)
    if world.rank == 0:
        write(Path(plan.out) / PLAN, plan)
    return plan


def _wait_for_others(folder: Path, script_record: ScriptRecord) -> None:
    """Waits until the other ranks have their records, too: their last step may need what this process still sends."""
    until = time.monotonic() + max(LEAVE_S, LEAVE_STEPS * max(script_record.step_s, default=0.0))
    while time.monotonic() < until:
        ended = {*folder.glob("rank[0-9]*.json"), *folder.glob("error-rank[0-9]*.json")}
        if len(ended) >= script_record.size:
            return
        time.sleep(0.01)
