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

import hashlib
import json
import os
import platform
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from samestep.data.fingerprint import Fingerprint, is_same_row
from samestep.data.schedule import Schedule
from samestep.errors import UserError, message_in, say, sent_line
from samestep.job import Job
from samestep.message import Message, as_said, message
from samestep.rank.checkpoint_files import (
    Damaged,
    Piece,
    Saved,
    checked,
    complete,
    newest,
    pack,
    part_folder,
    prune,
    remove_remains,
    write_part,
)
from samestep.rank.graceful_stop import AgreedStep
from samestep.records.checkpoint import FOLDER, MANIFEST, Interval, Manifest
from samestep.records.files import from_json
from samestep.records.launch_files import OF_A_STEP
from samestep.records.launch_request import JOB, LaunchRequest
from samestep.version import __version__
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, heartbeat
from samestep.world.regular_files import remove_folder

LARGEST_ORDER = 1_000_000  # rows: an order of the job's own is digested up to so many
VALUES = ("global_batch", "epochs", "max_steps", "seed", "shuffle", "last", "clip_norm", "ema", "gather_outputs")


@dataclass(frozen=True)
class Difference:
    """One thing in which two trainings differ: what it is, as it is here, as it is in the checkpoint."""

    what: str
    value: str
    saved: str

    @property
    def text(self) -> str:
        """The difference as a checkpoint keeps it."""
        return f"{self.what}: {self.saved} there, {self.value} here"

    @property
    def said(self) -> Message:
        return message("value_differs", what=self.what, here=self.value, there=self.saved)


@dataclass(frozen=True)
class TrainingIdentity:
    """The identity of a training. data: the datasets and the order of their rows. rows: dataset -> row -> its digest.
    values: of the job.

    changing: dataset -> how many of its rows that were looked at are others each time, and cannot be compared. changes:
    what differed when the training was continued on other data, with the step.
    """

    data: Mapping[str, str]
    rows: Mapping[str, Mapping[str, str]]
    values: Mapping[str, str]
    versions: Mapping[str, str]
    changing: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    def tree(self) -> dict[str, Any]:
        """Returns it for a checkpoint."""
        return asdict(self) | {"changes": list(self.changes)}

    def other_data(self, saved: TrainingIdentity) -> list[Difference]:
        """Returns in which data `there` differs."""
        differences = _differences(self.data, saved.data)
        for name, rows in self.rows.items():
            saved_rows = saved.rows.get(name, {})
            changed = [row for row in rows if not is_same_row(rows[row], saved_rows.get(row, rows[row]))]
            if changed and not any(difference.what.startswith(name) for difference in differences):
                rows_too = (
                    f" (and {len(changed) - 1} more of the {len(rows)} that were looked at)" if changed[1:] else ""
                )
                differences.append(
                    Difference(f"{name} row {changed[0]}{rows_too}", rows[changed[0]], saved_rows[changed[0]])
                )
        return differences

    def other_values(self, saved: TrainingIdentity) -> list[Difference]:
        """Returns in which values of the job `there` differs."""
        return _differences(self.values, saved.values)

    def other_versions(self, saved: TrainingIdentity) -> list[Difference]:
        """Returns in which versions `there` differs."""
        return _differences(self.versions, saved.versions)


def _differences(values: Mapping[str, str], saved: Mapping[str, str]) -> list[Difference]:
    """Returns in which values two mappings differ. What is in one alone could not be read in the other."""
    return [
        Difference(name, values[name], saved[name]) for name in values if saved.get(name, values[name]) != values[name]
    ]


def identity_of(job: Job, schedule: Schedule, fingerprints: Mapping[str, Fingerprint]) -> TrainingIdentity:
    """Returns the identity of a job's training. fingerprints: of its datasets, as check_same_data returns them."""
    data = {"evaluation rows": "0"}
    for name, fingerprint in fingerprints.items():
        data |= _data_of(name, fingerprint)
    data["steps an epoch"] = str(schedule.steps_per_epoch)
    if job.order is not None and len(job.train) <= LARGEST_ORDER:
        order = hashlib.blake2b(schedule.order(0).tobytes(), digest_size=8)
        data["the order of the rows (a digest)"] = order.hexdigest()
    versions = {"samestep": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return TrainingIdentity(
        data=data,
        rows={name: _rows_of(fingerprint) for name, fingerprint in fingerprints.items()},
        values=_values_of(job),
        versions=versions | {"Python": platform.python_version()},
        changing={name: fingerprint.changing for name, fingerprint in fingerprints.items() if fingerprint.changing},
    )


def _data_of(name: str, fingerprint: Fingerprint) -> dict[str, str]:
    labels = {f"{name} labels (a digest)": fingerprint.labels} if fingerprint.labels else {}
    return {f"{name} rows": str(fingerprint.length)} | labels


def _rows_of(fingerprint: Fingerprint) -> dict[str, str]:
    collated = {"0 and 1, augmented and collated": fingerprint.collated} if fingerprint.collated else {}
    return {str(row): digest for row, digest in fingerprint.rows.items()} | collated


def _values_of(job: Job) -> dict[str, str]:
    values = {name: str(getattr(job, name)) for name in VALUES}
    values["order"] = _shown(job.order)
    recipes = [phase.optimizer for phase in job.phases] or [job.optimizer]
    for number, recipe in enumerate(recipes):
        name = f"optimizer {number}" if job.phases else "optimizer"
        numbers = ", ".join(f"{key}={_shown(value)}" for key, value in sorted(recipe.settings.items()))
        values[name] = f"{recipe.cls.__qualname__}({numbers})"
    return values


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


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
                chosen, error = None, sent_line(raised.message)
            if self._store is not None:
                self._store.set("resume", json.dumps([str(chosen) if chosen else "", error, self.other_evaluation]))
        else:
            assert self._store is not None
            while not self._store.check(["resume"]):
                time.sleep(POLL_S)
            name, error, self.other_evaluation = json.loads(self._store.get("resume"))
            chosen = Path(name) if name else None
        if error:
            raise UserError(message_in(error) or error)
        if chosen is None:
            return None
        if not is_visible_soon(chosen / MANIFEST):
            raise UserError(message("checkpoint_not_seen_on_rank", rank=self.world.rank, checkpoint=chosen))
        saved = Saved(chosen)
        self._compare(saved.manifest, chosen)
        return saved

    def _compare(self, manifest: Manifest, path: Path) -> None:
        """Says from where the training continues. Raises UserError where that is another job's, unless it was named."""
        different = self.request.difference(manifest.asked, JOB) if self.request and manifest.asked else None
        difference = message("value_differs", **dict(zip(("what", "here", "there"), different))) if different else None
        named = self.resume not in ("auto", "never")
        if difference and not named:
            raise UserError(message("checkpoint_of_another_training", checkpoint=path, difference=difference))
        if self.world.rank == 0:
            trained = {"step": manifest.step, "engine": manifest.engine, "ranks": manifest.world_size}
            say(message("continues_from_checkpoint", difference=difference, **trained))

    def _compare_identity(self, path: Path) -> bool:
        """Compares what is trained with what the checkpoint in `path` was trained on. Returns whether the evaluation's
        data differ.

        Raises UserError where the data differ, or, unless the checkpoint was named, values of the job.
        """
        saved = Saved(path)
        saved_tree = saved.state.get("identity")
        if self.identity is None or saved_tree is None:
            return False
        saved_identity = from_json(TrainingIdentity, saved_tree, f"the identity in {path}")
        data, values = self.identity.other_data(saved_identity), self.identity.other_values(saved_identity)
        if values and self.resume in ("auto", "never"):
            raise UserError(message("checkpoint_of_another_training", checkpoint=path, difference=values[0].said))
        if data and not self._changed_data:
            differences = [difference.said for difference in data[:3]]
            raise UserError(message("checkpoint_of_other_data", checkpoint=path, differences=differences))
        for difference in [*data, *values, *self.identity.other_versions(saved_identity)]:
            say(message("checkpoint_differs", difference=difference.said))
        for name, count in self.identity.changing.items():
            say(message("rows_change_each_time", count=count, dataset=name))
        changes = tuple(f"since step {saved.manifest.step}: {difference.text}" for difference in data)
        self.identity = replace(self.identity, changes=(*saved_identity.changes, *changes))
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
                raise UserError(message("no_checkpoint_there", folder=path))
            return checkpoint
        try:
            checked(path)
        except Damaged as error:
            raise UserError(message("checkpoint_damaged", checkpoint=path, why=error.why)) from None
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
            failure = self._not_written(self.world.rank, error)
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
            # The part itself says so, too: a store that is a file in the run's folder may be removed with it.
            while not self._store.check([key]) and not part.exists():
                time.sleep(POLL_S)
            failure = failure or ("" if part.exists() else self._store.get(key).decode())
            if not failure and not is_visible_soon(part):
                failure = sent_line(message("part_written_into_another_folder", rank=rank, folder=self.folder))
        try:
            if not failure:
                complete(self.folder, done, self.engine, self.world.size, self.request)
                prune(self.folder, self.keep, done)
        except OSError as error:
            failure = self._not_written(0, error)
        if failure:
            remove_folder(part_folder(self.folder, done), OF_A_STEP)
            say(message("checkpoint_not_written", step=done, why=message_in(failure) or as_said(failure)))

    def _not_written(self, rank: int, error: Exception) -> str:
        """Returns why a rank's part is not on the disk, as a line for another rank."""
        return sent_line(message("rank_cannot_write", rank=rank, folder=self.folder, error=_what(error)))


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
