"""Spot checks of a training: what the process that replays steps is told, and what it answers.

spot-check/plan.json             the SpotCheckPlan, which rank 0 writes
spot-check/step-1999/rank1.*     what rank 1 saw of step 1999, as a part of a checkpoint is written
spot-checks.jsonl                a SpotCheck in each line, beside the weights
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from samestep.engine import Layout
from samestep.errors import UserError
from samestep.message import Message
from samestep.records.files import as_json, from_json
from samestep.world.regular_files import open_end, read_regular

FOLDER, PLAN, CHECKS = "spot-check", "plan.json", "spot-checks.jsonl"


@dataclass(frozen=True)
class SpotCheckPlan:
    """What the process that replays steps is to do."""

    IS_PRIVATE: ClassVar = True  # it holds settings as they were given

    job: str
    """Job to replay, as of Plan."""

    settings: Mapping[str, str]
    """Settings of the job, as of Plan."""

    layout: Layout
    """Layout of the engine that trains."""

    world_size: int
    """Number of ranks of the training."""

    device: str
    """Device on which the steps are replayed."""

    checks: str
    """Path of the file to which each SpotCheck is added."""

    stops: bool = False
    """Whether a step that differs ends the training."""


@dataclass(frozen=True)
class SpotCheck:
    """One step that was looked at."""

    step: int
    """Number of the step, from 0."""

    verdict: Literal["same", "differs", "unknown"]
    """Whether the replay computed the same. 'unknown' where the step could not be replayed."""

    found: Message | None = None
    """What differs, or why it is not known. None: the step is the same."""

    ranks: list[int] = field(default_factory=list)
    """Ranks on which the step differs."""

    largest: float = 0.0
    """Greatest distance of all quantities, as a multiple of the quantity's bound."""

    bitwise: bool = False
    """Whether gradients and weights are the replay's bit by bit."""

    capture_s: float = 0.0
    """Longest time that a rank's training was held up, in seconds."""

    replay_s: float = 0.0
    """CPU time of the replay, in seconds."""


def add_check(file: Path, check: SpotCheck) -> None:
    """Adds a check to a training's. A disk that is full ends no training."""
    with suppress(OSError), open_end(file, text=True) as lines:
        lines.write(json.dumps(as_json(check)) + "\n")


def spot_checks_in(file: Path) -> list[SpotCheck]:
    """Returns the checks of a training so far, in the order in which they were made."""
    checks = []
    with suppress(OSError):
        for line in read_regular(file).decode(errors="replace").splitlines():
            with suppress(UserError, json.JSONDecodeError):  # a line that is cut off by a full disk
                checks.append(from_json(SpotCheck, json.loads(line), f"a line of {file}"))
    return checks
