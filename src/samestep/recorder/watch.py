"""samestep.watch: records a training in the process that calls it, a notebook or a script, and judges it there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from samestep.errors import ObservationFailed, TrainingFailed, UserError, say
from samestep.job.foreign import is_a
from samestep.message import message
from samestep.recorder.guards import fault_record, recorder_guard
from samestep.recorder.recorder import Recorder
from samestep.records.files import read, write
from samestep.records.findings import CheckResults
from samestep.records.record import RankError
from samestep.records.results import RESULTS
from samestep.records.script import ScriptRecord
from samestep.records.script_plan import PLAN, ScriptPlan
from samestep.world import World
from samestep.world.imports import module_arguments
from samestep.world.processes import wait_for

WAIT_S = 60.0  # for the records of the other ranks, which end the same step
_now: list[Watch] = []


class Watch:
    """A training that is recorded until its steps are done, or results() is called."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, plan: ScriptPlan, world: World) -> None:
        self._plan, self._world, self._loader = plan, world, loader
        self._results: CheckResults | None = None
        self._recorder = Recorder(plan, world, self._end)
        recorder_guard.begin(self._fail)
        self._recorder.attach()
        self._recorder.begin(model, optimizer)
        _now.append(self)

    def results(self) -> CheckResults:
        """Returns the answers; ends the recording if it goes on still. Each rank calls it, and each gets the answers.

        Raises TrainingFailed where another rank has not ended its last step within a minute.
        """
        if self in _now:
            recorder_guard.hook(self._end_by_itself)()
        if self._results is None:
            self._results = self._judged()
        return self._results

    def _end_by_itself(self) -> None:
        self._end(self._recorder.record("itself"))

    def _fail(self, fault: Exception) -> None:
        """Ends the recording, which has failed itself: the training goes on without it."""
        failed = fault_record(fault, self._world.rank)
        say(failed.message)
        self._recorder.release()
        if self in _now:
            _now.remove(self)
        write(self._error_of(self._world.rank), failed)

    def _error_of(self, rank: int) -> Path:
        return Path(self._plan.out) / f"error-rank{rank}.json"

    def _end(self, record: ScriptRecord) -> None:
        self._recorder.release()
        _now.remove(self)
        if self._loader is not None and not record.passes:
            record.notes.append(message("loader_not_read"))
        folder = Path(self._plan.out)
        write(folder / f"rank{self._world.rank}.json", record)
        if self._world.rank == 0:
            try:
                self._wait([folder / f"rank{rank}.json" for rank in range(self._world.size)])
            except (ObservationFailed, TrainingFailed) as failed:  # the training goes on without the answers
                say(failed.message)
                return
            # The judge is the parent's side, which a child does not import.
            with tempfile.TemporaryFile("w+") as printed:
                judge = subprocess.Popen(
                    [sys.executable, *module_arguments("samestep.commands.judge_records"), str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                )
                with suppress(TrainingFailed):  # the training goes on without the answers
                    wait_for(judge, message("records_are_being_judged"), deadline_s=WAIT_S)
                printed.seek(0)
                print(printed.read(), flush=True)

    def _judged(self) -> CheckResults:
        path = Path(self._plan.out) / RESULTS
        self._wait([path])
        return read(CheckResults, path)

    def _wait(self, files: list[Path]) -> None:
        deadline = time.monotonic() + WAIT_S
        while missing := [file for file in files if not file.exists()]:
            for rank in range(self._world.size):
                if self._error_of(rank).exists():
                    raise ObservationFailed(read(RankError, self._error_of(rank)).message)
            if time.monotonic() > deadline:
                raise TrainingFailed(message("rank_not_watched", file=missing[0].name, seconds=WAIT_S))
            time.sleep(0.01)


def watch(model: nn.Module, optimizer: Optimizer, loader: Any = None, steps: int = 8) -> Watch:
    """Records the next optimizer steps of this process, prints the answers after them, and lets the training go on.

    Call it on every rank, after the model is wrapped and the process group is open, and before the training loop.
    loader: the DataLoader of the training, if it has one. steps: of this optimizer. `results()` of what it returns
    holds the answers, as `samestep check` gives them without a replay. Raises UserError for other arguments.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's or Fabric's wrapper
    for what, kind, name in ((model, nn.Module, "model"), (optimizer, Optimizer, "optimizer")):
        if not is_a(what, kind):
            raise UserError(
                f"samestep.watch: the {name} is of type {type(what).__name__}; give a torch {kind.__name__}"
            )
    if loader is not None and not hasattr(loader, "__iter__"):
        raise UserError(f"samestep.watch: the loader is of type {type(loader).__name__}; give the DataLoader, or None")
    if steps < 1:
        raise UserError(f"samestep.watch: steps is {steps}; give at least 1")
    if _now:
        raise UserError("samestep.watch: another training is watched now; call its results() first")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("samestep.watch: open the process group first (init_process_group), so that it knows the ranks")
    plan = ScriptPlan(_folder(rank, size), time.time(), sys.argv[0] or "notebook", (), steps, ranks=size)
    if rank == 0:
        write(Path(plan.out) / PLAN, plan)
    return Watch(model, optimizer, loader, plan, World(rank, size))


def _folder(rank: int, size: int) -> str:
    """Returns a new folder, the same on all ranks of this machine."""
    made = [tempfile.mkdtemp(prefix="samestep-watch-") if rank == 0 else ""]
    if size > 1:
        dist.broadcast_object_list(made, src=0)
    return made[0]
