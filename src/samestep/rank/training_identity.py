"""What makes a training the one that it is: by this, a checkpoint and the job that is to continue it are compared.

A checkpoint keeps it on rank 0, as `identity`. Data that differ are refused, unless --resume-changed-data is given; so
are values of the job, unless the checkpoint was named; versions that differ are told.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.data.fingerprint import Fingerprint, is_same_row
from samestep.data.schedule import Schedule
from samestep.job import Job
from samestep.version import __version__

LARGEST_ORDER = 1_000_000  # rows: an order of the job's own is digested up to so many
VALUES = ("global_batch", "epochs", "max_steps", "seed", "shuffle", "last", "clip_norm", "ema", "gather_outputs")


@dataclass(frozen=True)
class Difference:
    """One thing in which two trainings differ: what it is, as it is here, as it is in the checkpoint."""

    what: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.what}: {self.there} there, {self.here} here"


def other_training(path: Path, difference: Difference) -> str:
    """Returns the sentence about a checkpoint of a training with other values."""
    return (
        f"{path} is of another training: {difference}; give another folder with --out, or continue it all the "
        f"same with --resume {path}"
    )


def other_data(path: Path, differences: Sequence[Difference]) -> str:
    """Returns the sentence about a checkpoint of a training on other data."""
    return (
        f"{path} is of a training on other data: {', '.join(map(str, differences[:3]))}; give the data that it was "
        "trained on, or add --resume-changed-data to go on with these"
    )


@dataclass(frozen=True)
class TrainingIdentity:
    """What is trained. data: what is read, and in which order. rows: dataset -> row -> its digest. values: of the job.

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

    def other_data(self, there: TrainingIdentity) -> list[Difference]:
        """Returns in which data `there` differs."""
        differences = _differences(self.data, there.data)
        for name, rows in self.rows.items():
            rows_there = there.rows.get(name, {})
            other = [row for row in rows if not is_same_row(rows[row], rows_there.get(row, rows[row]))]
            if other and not any(each.what.startswith(name) for each in differences):
                rows_too = f" (and {len(other) - 1} more of the {len(rows)} that were looked at)" if other[1:] else ""
                differences.append(Difference(f"{name} row {other[0]}{rows_too}", rows[other[0]], rows_there[other[0]]))
        return differences

    def other_values(self, there: TrainingIdentity) -> list[Difference]:
        """Returns in which values of the job `there` differs."""
        return _differences(self.values, there.values)

    def other_versions(self, there: TrainingIdentity) -> list[Difference]:
        """Returns in which versions `there` differs."""
        return _differences(self.versions, there.versions)


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[Difference]:
    """Returns in which values two mappings differ. What is in one alone could not be read in the other."""
    return [Difference(name, here[name], there[name]) for name in here if there.get(name, here[name]) != here[name]]


def identity_of(job: Job, schedule: Schedule, fingerprints: Mapping[str, Fingerprint]) -> TrainingIdentity:
    """Returns the identity of a job's training. fingerprints: of its datasets, as check_same_data returns them."""
    data = {"evaluation rows": "0"}
    for name, seen in fingerprints.items():
        data |= _data_of(name, seen)
    data["steps an epoch"] = str(schedule.steps_per_epoch)
    if job.order is not None and len(job.train) <= LARGEST_ORDER:
        order = hashlib.blake2b(schedule.order(0).tobytes(), digest_size=8)
        data["the order of the rows (a digest)"] = order.hexdigest()
    versions = {"samestep": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return TrainingIdentity(
        data=data,
        rows={name: _rows_of(seen) for name, seen in fingerprints.items()},
        values=_values_of(job),
        versions=versions | {"Python": platform.python_version()},
        changing={name: seen.changing for name, seen in fingerprints.items() if seen.changing},
    )


def _data_of(name: str, seen: Fingerprint) -> dict[str, str]:
    labels = {f"{name} labels (a digest)": seen.labels} if seen.labels else {}
    return {f"{name} rows": str(seen.length)} | labels


def _rows_of(seen: Fingerprint) -> dict[str, str]:
    collated = {"0 and 1, augmented and collated": seen.collated} if seen.collated else {}
    return {str(row): digest for row, digest in seen.rows.items()} | collated


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
