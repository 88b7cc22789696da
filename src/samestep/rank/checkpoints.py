"""Checkpoints of one training: where it continues, when the next one is due, and writing it beside the training.

    checkpoints = Checkpoints(folder, world, store, every=Interval(100, "steps"), keep=3, resume="auto")
    run = Run(job, world, steps, checkpoints=checkpoints, stop=StopAfter(40))

Give a Run its checkpoints, and it does the rest: begin() continues from the newest undamaged checkpoint in `folder`
(resume="auto"), from the one that is named (resume=PATH), or begins anew (resume="never"); step() writes those that are
due; a training that is stopped before its end writes one after its last step, as with StopAfter(40), which ends a
training after 40 steps. Another Run of the same job then continues there, of any engine and on any number of ranks.

Each rank copies its part to the CPU in the loop, and writes it in a thread. No collective is used: the ranks tell one
another in the rendezvous store, `store` (None for one process).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from samestep.errors import UserError, say
from samestep.rank.checkpoint_files import (
    Damaged,
    Saved,
    checked,
    complete,
    newest,
    part_folder,
    prune,
    remove_remains,
    write_part,
)
from samestep.rank.graceful_stop import AgreedStep
from samestep.rank.packed import Piece, pack
from samestep.rank.training_identity import TrainingIdentity, other_data, other_training
from samestep.records.checkpoint import FOLDER, MANIFEST, Interval, Manifest
from samestep.records.files import from_json
from samestep.records.launch_request import JOB, LaunchRequest
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, heartbeat

POLL_S = 0.05
VISIBLE_S = 20.0  # how long a file of another machine may take to be seen in a shared folder


class StopAfter:
    """Ends a training after `steps` steps: a Run's `stop`."""

    def __init__(self, steps: int) -> None:
        self.last: int | None = steps - 1

    def after(self, done: int) -> None:
        """Ends it earlier, as GracefulStop.after does."""
        self.last = min(done, self.last if self.last is not None else done)

    def ends_before(self, step: int) -> bool:
        """Returns whether the training ends before `step`."""
        return self.last is not None and step > self.last


class Checkpoints:
    """The checkpoints of one training in `folder`, on this rank.

    every: how far apart they are; None: one is written only when the training is stopped before its end.
    keep: how many of the newest stay. resume: 'auto', 'never', or the path of a checkpoint, or of a folder of them.
    engine: its name, for the manifest. request: what is trained, by which the checkpoint of another job is recognised.
    attempt: how often these ranks have been restarted; then they continue from the newest one, whatever `resume` is.
    identity: of what is trained; None: nothing is compared. changed_data: continue on other data.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        store: Store | None,
        *,
        every: Interval | None = None,
        keep: int = 3,
        resume: str = "auto",
        engine: str = "",
        request: LaunchRequest | None = None,
        attempt: int = 0,
        identity: TrainingIdentity | None = None,
        changed_data: bool = False,
    ) -> None:
        self.folder, self.world, self.every, self.keep, self.resume = folder, world, every, keep, resume
        self.engine, self.request, self.attempt, self._store = engine, request, attempt, store
        self.identity, self._changed_data = identity, changed_data
        self.other_evaluation = False  # whether the evaluations so far are of other data: none of them can be the best
        self._thread: threading.Thread | None = None
        self._timer: AgreedStep | None = None
        self._timers, self._due_at = 0, 0.0
        self._timed: int | None = None  # the steps after which the next timed checkpoint is due; None: not agreed yet
        self._start_timer()

    def load(self) -> Saved | None:
        """Returns the checkpoint to continue from; None: the training begins anew. Every rank must call it.

        Rank 0 chooses. Raises UserError where there is no such checkpoint, and where this machine does not see it.
        """
        heartbeat.begin(CHECKPOINT)
        if self.world.rank == 0:
            try:
                chosen, error = self._choose(), ""
                if chosen is not None:
                    self.other_evaluation = self._compare_identity(chosen)
            except UserError as raised:
                chosen, error = None, str(raised)
            if self._store is not None:
                self._store.set("resume", json.dumps([str(chosen) if chosen else "", error, self.other_evaluation]))
        else:
            assert self._store is not None
            while not self._store.check(["resume"]):
                time.sleep(POLL_S)
            name, error, self.other_evaluation = json.loads(self._store.get("resume"))
            chosen = Path(name) if name else None
        if error:
            raise UserError(error)
        if chosen is None:
            return None
        if not is_visible_soon(chosen / MANIFEST):
            raise UserError(
                f"rank {self.world.rank} does not see {chosen}, from which rank 0 continues; put --out on a folder that"
                " all machines share"
            )
        saved = Saved(chosen)
        self._compare(saved.manifest, chosen)
        return saved

    def _compare(self, there: Manifest, path: Path) -> None:
        """Says from where the training continues. Raises UserError where that is another job's, unless it was named."""
        which = f"step {there.step}, of {there.engine} on {there.world_size} rank{'s' if there.world_size > 1 else ''}"
        different = self.request.difference(there.asked, JOB) if self.request and there.asked else None
        named = self.resume not in ("auto", "never")
        if different and not named:
            what, mine, theirs = different
            raise UserError(
                f"{path} is of another training: {what}: {theirs} there, {mine} here; give another folder with --out, "
                f"or continue it all the same with --resume {path}"
            )
        if self.world.rank == 0:
            other = f"; {different[0]}: {different[2]} there, {different[1]} here" if different else ""
            say(f"continues from the checkpoint of {which}{other}")

    def _compare_identity(self, path: Path) -> bool:
        """Compares what is trained with what the checkpoint in `path` was trained on. Returns whether the evaluation's
        data differ.

        Raises UserError where the data differ, or, unless the checkpoint was named, values of the job.
        """
        saved = Saved(path)
        there_tree = saved.state.get("identity")
        if self.identity is None or there_tree is None:
            return False
        there = from_json(TrainingIdentity, there_tree, f"the identity in {path}")
        data, values = self.identity.other_data(there), self.identity.other_values(there)
        if values and self.resume in ("auto", "never"):
            raise UserError(other_training(path, values[0]))
        if data and not self._changed_data:
            raise UserError(other_data(path, data))
        for difference in [*data, *values, *self.identity.other_versions(there)]:
            say(f"the checkpoint differs: {difference}")
        for name, count in self.identity.changing.items():
            say(f"{count} of the {name} rows that were looked at change each time they are read, and were not compared")
        changes = tuple(f"since step {saved.manifest.step}: {difference}" for difference in data)
        self.identity = replace(self.identity, changes=(*there.changes, *changes))
        return any(difference.what.startswith("evaluation") for difference in data)

    def _choose(self) -> Path | None:
        remove_remains(self.folder)
        if self.resume == "auto" or self.attempt:
            checkpoint = newest(self.folder, say)
            if checkpoint or self.resume == "auto":
                return checkpoint
        if self.resume == "never":
            return None
        path = Path(self.resume)
        if not (path / MANIFEST).exists():
            checkpoint = newest(path, say) or newest(path / FOLDER, say)
            if checkpoint is None:
                raise UserError(
                    f"--resume {path} holds no checkpoint; give a run's folder, or one of its step-… folders"
                )
            return checkpoint
        try:
            checked(path)
        except Damaged as error:
            raise UserError(f"--resume {path}: the checkpoint is damaged: {error}; give another one") from None
        return path

    def before(self, step: int) -> None:
        """Lets the ranks agree on the step of the next timed checkpoint. Call it before each step's first batch."""
        if self._timer is None or self._timed is not None:
            return
        if self.world.rank == 0 and time.monotonic() >= self._due_at:
            self._timer.request()
        self._timed = self._timer.agreed(step, alone=step + 1)

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        """Returns whether a checkpoint is to be taken after `done` steps; the same on every rank."""
        if self.every is None:
            return False
        if self.every.unit == "s":
            return self._timed == done
        return done % (self.every.count * (steps_per_epoch if self.every.unit == "epochs" else 1)) == 0

    def take(self, done: int, tree: Any, files: Sequence[Path] = ()) -> None:
        """Copies this rank's part of the state after `done` steps, and begins to write it. Every rank must call it.

        files: what rank 0 keeps with it. Waits first until the checkpoint before is on the disk. An error of the disk
        does not end the training: a sentence says it, and the checkpoints before stay.
        """
        self.wait()
        packed, pieces = pack(tree)
        if self.world.device != "cpu":
            torch.cuda.synchronize(self.world.device)
        # Opened here: a better one may replace the file while the thread runs.
        opened = {file.name: open(file, "rb") for file in files if self.world.rank == 0}  # noqa: SIM115
        self._thread = threading.Thread(target=self._write, args=(done, packed, pieces, opened), daemon=True)
        self._thread.start()
        self._start_timer()

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is on the disk."""
        if self._thread is not None:
            heartbeat.begin(CHECKPOINT)  # a slow disk is no slow step
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for the last checkpoint. Call it after the training."""
        self.wait()
        if self._timer is not None:
            self._timer.close()

    def _start_timer(self) -> None:
        """Begins to count the seconds to the next timed checkpoint."""
        if self.every is None or self.every.unit != "s":
            return
        if self._timer is not None:
            self._timer.close()
        self._timers += 1
        store = None if self._store is None else PrefixStore(f"timer {self._timers}", self._store)
        self._timer, self._timed = AgreedStep(self.world, store), None
        self._due_at = time.monotonic() + self.every.count

    def _write(self, done: int, packed: Any, pieces: dict[str, Piece], files: Mapping[str, IO[bytes]]) -> None:
        """Writes this rank's part, tells the others, and on rank 0 completes the checkpoint. Runs in a thread."""
        failure = ""
        try:
            write_part(part_folder(self.folder, done), self.world.rank, packed, pieces, files)
        except Exception as error:
            failure = f"rank {self.world.rank} cannot write to {self.folder} ({_what(error)})"
        finally:
            for file in files.values():
                file.close()
        with suppress(RuntimeError):  # the store is closed or lost; then the training's collectives fail, and say so
            if self._store is not None and self.world.rank > 0:
                self._store.set(f"written {done} by {self.world.rank}", failure)
            if self.world.rank == 0:
                self._complete(done, failure)

    def _complete(self, done: int, failure: str) -> None:
        for rank in range(1, self.world.size):
            assert self._store is not None
            part, key = part_folder(self.folder, done) / f"rank{rank}.json", f"written {done} by {rank}"
            # The part itself tells, too: a store that is a file in the run's folder may be removed with it.
            while not self._store.check([key]) and not part.exists():
                time.sleep(POLL_S)
            failure = failure or ("" if part.exists() else self._store.get(key).decode())
            if not failure and not is_visible_soon(part):
                failure = f"rank {rank} has written its part into another {self.folder}: all machines must share it"
        try:
            if not failure:
                complete(self.folder, done, self.engine, self.world.size, self.request)
                prune(self.folder, self.keep, done)
        except OSError as error:
            failure = f"rank 0 cannot write to {self.folder} ({_what(error)})"
        if failure:
            shutil.rmtree(part_folder(self.folder, done), ignore_errors=True)
            say(f"no checkpoint of step {done}: {failure}; the training goes on")


def is_visible_soon(path: Path) -> bool:
    """Waits until a file is visible, which takes a moment in a folder that machines share. Returns whether it is."""
    until = time.monotonic() + VISIBLE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(POLL_S)
    return path.exists()


def _what(error: Exception) -> str:
    if number := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors' own error
        return os.strerror(int(number[1]))
    return str(getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0])
