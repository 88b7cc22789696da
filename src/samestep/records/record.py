"""The record of a launch: files that the ranks write and the parent reads.

A rank writes `rankR.json`, what it observed, and `rankR.NAME.npz`, tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samestep.message import Message
from samestep.records.collectives import CollectiveRank
from samestep.records.files import is_current, read, write
from samestep.records.inspection import MachineFacts
from samestep.records.plan import Plan
from samestep.records.reference_record import ReferenceLayoutRecord
from samestep.records.tensor_files import read_arrays
from samestep.records.training_record import TrainingRecord
from samestep.records.trial import Trial
from samestep.world import World
from samestep.world.regular_files import paths_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRESS = "progress.json"
ENVIRONMENT = "environment-of-rank0.json"  # rank 0's values of the variables that a launcher needs
ATTEMPT = "SAMESTEP_ATTEMPT"  # environment variable: how often the machines have met before; unset: torchrun counts
SAVE_VARIABLES = "SAMESTEP_SAVE_VARIABLES"  # environment variable: their names, separated by commas


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote."""

    rank: int
    """The rank's number."""

    world: World
    """The rank's place among all ranks."""

    threads: int
    """The number of threads with which the rank computed."""

    started_at: float
    """When the launch was started, in seconds of Unix time."""

    machine: MachineFacts
    """The machine on which the rank ran."""

    trainings: Mapping[str, TrainingRecord] = field(default_factory=dict)
    """Training -> what the rank observed; empty for the reference."""

    layouts: list[ReferenceLayoutRecord] = field(default_factory=list)
    """The layouts that the reference played; empty for an engine."""

    trials: list[Trial] = field(default_factory=list)
    """The candidate faults with which the reference replayed a training."""

    collectives: list[CollectiveRank] = field(default_factory=list)
    """What each rank observed of its collectives, in rank order; on rank 0 only."""


FAULT = "samestep_has_failed"  # the message of an exception of samestep's own


@dataclass(frozen=True)
class RankError:
    """Why a rank failed."""

    rank: int
    """The rank's number."""

    kind: Literal["user", "refused", "crash"]
    """'user': a mistake that the user can fix. 'refused': a layer or the engine cannot do what the job needs.
    'crash': any other error."""

    message: Message
    """The error's message."""

    time: float
    """When the rank failed, in seconds of Unix time."""

    traceback: str
    """The end of the error's traceback."""

    lost_peer: bool
    """Whether the error only reports that another rank is lost."""


@dataclass(frozen=True)
class Progress:
    """What a launch is doing."""

    activity: str = "starting"
    """What rank 0 is doing: the name of a training, 'starting', or 'evaluate'."""

    attempt: int = 0
    """How often the launcher has restarted the launch."""

    done: int | None = None
    """The number of optimizer steps done; None: the training has not begun."""

    steps: int = 0
    """The number of optimizer steps to do; 0: unknown."""

    samples: int = 0
    """The number of rows in the steps done."""

    loss: float = 0.0
    """The loss of a recent micro-batch."""

    curve: list[dict[str, float]] = field(default_factory=list)
    """The evaluations so far, as TrainingRecord.curve."""

    resumed_from: int = 0
    """The number of optimizer steps that an earlier launch has done."""

    ranks: int = 0
    """The number of ranks; 0: not known yet."""


def write_progress(rank: int, folder: Path, progress: Progress) -> None:
    """Writes progress.json, on rank 0 only. A disk that takes no file ends no training: the command looks for that."""
    if rank == 0:
        with suppress(OSError):
            write(folder / PROGRESS, progress)


def attempt() -> int:
    """Returns how often the launcher has restarted these ranks."""
    text = os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0  # a variable that is left over in a shell may hold anything


def read_progress(folder: Path, before: Progress = Progress()) -> Progress:
    """Reads the launch's latest progress. before: what is returned where there is none, as in a removed folder."""
    try:
        return read(Progress, folder / PROGRESS)
    except OSError:
        return before


def rank_files(folder: Path) -> list[Path]:
    """Returns the ranks' records in a folder, in rank order: rank0.json, rank1.json, …, and no file of a like name."""
    named = [re.fullmatch(r"rank(0|[1-9][0-9]{0,8})\.json", path.name) for path in paths_in(folder, "rank*.json")]
    return [folder / f"rank{number}.json" for number in sorted(int(name[1]) for name in named if name)]


@dataclass(frozen=True)
class Record:
    """The folder of one launch. ranks: the ranks' records, in rank order; empty before the ranks have ended."""

    folder: Path

    @cached_property
    def ranks(self) -> list[RankRecord]:
        return [read(RankRecord, file) for file in rank_files(self.folder)]

    def plan(self) -> Plan:
        """Reads the launch's plan."""
        return read(Plan, self.folder / "plan.json")

    def written(self) -> set[int]:
        """Returns the ranks that have written a record."""
        return {int(path.stem.removeprefix("rank")) for path in rank_files(self.folder)}

    def complete(self, size: int) -> bool:
        """Returns whether all `size` ranks have written a record of this schema."""
        files = rank_files(self.folder)
        return len(files) == size and all(map(is_current, files))

    def error(self) -> RankError | None:
        """Returns the first error, or None. An error that only reports a lost rank comes after all others."""
        errors = list[RankError]()
        for file in paths_in(self.folder, "error-rank*.json"):
            with suppress(FileNotFoundError):  # somebody has removed it meanwhile
                errors.append(read(RankError, file))
        return min(errors, key=lambda error: (error.lost_peer, error.time), default=None)

    def folder_of(self, name: str) -> Path:
        """Returns the folder of the launch that ended a training."""
        return self.folder

    def training(self, name: str) -> list[TrainingRecord]:
        """Returns what each rank observed in one training."""
        return [rank.trainings[name] for rank in self.ranks]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """Returns the tensors that `rank` wrote under `name`. Raises TrainingFailed for a file that cannot be read."""
        return read_arrays(self.folder, rank, name)
