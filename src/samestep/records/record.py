"""Record: what a launch did, as files. A rank writes `rankR.json` and `rankR.NAME.npz`; the parent reads them.

JSON holds what was observed, npz the tensors.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.engine import Layout
from samestep.records.files import KEY, SCHEMA, read, replace, write
from samestep.records.inspection import MachineFacts
from samestep.records.plan import Plan
from samestep.world import World

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Arrays = Mapping[str, NDArray[np.generic]]

PROGRESS = "progress.json"
ENVIRONMENT = "environment-of-rank0.json"  # the values of the variables that a launcher wants to know
TELL = "SAMESTEP_TELL"  # the environment's name for their names
PREFIX = "tensor "  # so that no tensor's name is one of numpy.savez's own arguments


@dataclass(frozen=True)
class PartSeen:
    """What one process saw of one micro-batch. digests: of each row's tensors. loss: their mean, in the reference."""

    epoch: int
    step: int
    micro: int
    indices: list[int]
    weight: float
    digests: list[str]
    loss: float | None = None


@dataclass(frozen=True)
class EvaluationSeen:
    """rows: how many all ranks evaluated; weight: what they weigh in the loss. sums: of the loss times the weight, and
    of each metric; of those named in `whole`, the value. means: the same by rows or weight. indices: those that this
    rank evaluated. unsteady: the sums that depend on how many rows are evaluated at once, or on random numbers."""

    rows: int
    weight: float
    sums: Mapping[str, float]
    whole: tuple[str, ...] = ()
    means: Mapping[str, float] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    unsteady: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observations:
    """What one rank observed in one training.

    losses, step_of, weight_of: of each micro-batch, its mean loss, its step and its weight. step_s, wait_s: of each
    step, its seconds and those of them that it waited for data. fetch_s, fetch_cpu_s: of all loading. began_at: the
    first batch, in seconds since 1970. start_digest: of the first weights. parts: each micro-batch; later: epoch -> the
    rows of its first step; rates: of each optimizer step and parameter group (all three only for the proof).
    curve: the evaluations, each {step, loss, …}; best_at: the place of the best in it, -1: none. stopped: 'early' or
    'asked'.
    """

    losses: list[float] = field(default_factory=list)
    step_of: list[int] = field(default_factory=list)
    weight_of: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    began_at: float | None = None
    start_digest: str | None = None
    autocast: bool = False
    parts: list[PartSeen] = field(default_factory=list)
    later: Mapping[int, list[int]] = field(default_factory=dict)
    rates: list[list[float]] = field(default_factory=list)
    skipped_steps: int = 0
    peak_memory_bytes: int | None = None
    evaluation: EvaluationSeen | None = None
    asked_steps: int | None = None
    stopped: str | None = None
    curve: list[dict[str, float]] = field(default_factory=list)
    best_at: int = -1


@dataclass(frozen=True)
class Played:
    """What the reference saw in one training. seen: [replica][micro-batch]. later: epoch -> [micro-batch][replica] ->
    the rows of its first step. rates: [step][group]. norms: of each step's gradient. draws: whether the model draws
    random numbers. parameters: their names; length: rows of the subset; clip_norm: the job's."""

    seen: list[list[PartSeen]]
    later: Mapping[int, list[list[list[int]]]]
    rates: list[list[float]]
    norms: list[float]
    draws: bool
    start_digest: str
    parameters: list[str]
    length: int
    clip_norm: float | None = None
    evaluation: EvaluationSeen | None = None


@dataclass(frozen=True)
class PlayedLayout:
    """What the reference played for one layout. trainings: name -> the training as it is, and twice with its rounding
    shaken. dtype: in which; float64_failed: why not in float64. sgd_lr: the rate of 'sgd'; sgd_lr_usual: at which it
    is tried first."""

    layout: Layout
    dtype: str
    float64_failed: str | None
    rounds_to: str | None
    exact_steps: int
    clip_norm: float | None
    sgd_lr: float
    sgd_lr_usual: float
    trainings: Mapping[str, list[Played]]


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote. started_at: the launch, in seconds since 1970. layouts: of the reference."""

    rank: int
    world: World
    threads: int
    started_at: float
    machine: MachineFacts
    trainings: Mapping[str, Observations] = field(default_factory=dict)
    layouts: list[PlayedLayout] = field(default_factory=list)


@dataclass(frozen=True)
class RankError:
    """Why a rank failed. kind: 'user', 'refused' or 'crash'. lost_peer: whether it only tells of another's end.
    time: in seconds since 1970."""

    rank: int
    kind: str
    message: str
    time: float
    traceback: str
    lost_peer: bool


@dataclass(frozen=True)
class Progress:
    """What a launch does now. attempt: how often torchrun has started it again. done: steps of a training, None before
    it trains; samples: that these have seen; loss: a recent one; curve: the evaluations so far."""

    phase: str = "starting"
    attempt: int = 0
    done: int | None = None
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def write_progress(rank: int, folder: Path, progress: Progress) -> None:
    """Writes what the launch does now into progress.json, on rank 0."""
    if rank == 0:
        write(folder / PROGRESS, progress)


def attempt() -> int:
    """How often torchrun has started these ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def read_progress(folder: Path) -> Progress:
    """What the launch in `folder` last read_progress."""
    path = folder / PROGRESS
    return read(Progress, path) if path.exists() else Progress()


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes named arrays to `path` (.npz), whole or not at all."""
    import numpy as np

    buffer = io.BytesIO()
    named = {PREFIX + name: array for name, array in arrays.items()}
    np.savez(buffer, **named)  # type: ignore[arg-type]  # its stub takes the names for its own options
    replace(path, buffer.getvalue())


def write_state(folder: Path, rank: int, name: str, state: Mapping[str, Tensor]) -> None:
    """A state dict as rank's arrays, which `Record.arrays(name)` reads. numpy knows no bfloat16: it becomes float32."""
    arrays = {}
    for key, tensor in state.items():
        if not hasattr(tensor, "detach"):
            continue  # what get_extra_state returned
        tensor = tensor.detach().cpu()
        arrays[key] = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    write_arrays(folder / f"rank{rank}.{name}.npz", arrays)


@dataclass(frozen=True)
class Record:
    """The folder of one launch. `ranks`: what each rank wrote, in rank order; empty before they have ended."""

    folder: Path

    @cached_property
    def ranks(self) -> list[RankRecord]:
        return [read(RankRecord, file) for file in self._files()]

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("rank[0-9]*.json"), key=lambda path: int(path.stem.removeprefix("rank")))

    def plan(self) -> Plan:
        """What the launch was asked to do."""
        return read(Plan, self.folder / "plan.json")

    def complete(self, size: int) -> bool:
        """Whether all `size` ranks wrote their part, in this schema."""
        files = self._files()
        return len(files) == size and all(json.loads(file.read_text()).get(KEY) == SCHEMA for file in files)

    def error(self) -> RankError | None:
        """The error that came first; None when no rank wrote one. The others' mostly say that the first rank left."""
        errors = [read(RankError, file) for file in self.folder.glob("error-rank*.json")]
        return min(errors, key=lambda error: (error.lost_peer, error.time), default=None)

    def training(self, name: str) -> list[Observations]:
        """What each rank observed in one training."""
        return [rank.trainings[name] for rank in self.ranks]

    def arrays(self, name: str, rank: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors that `rank` wrote under `name`."""
        import numpy as np

        with np.load(self.folder / f"rank{rank}.{name}.npz") as file:
            return {name.removeprefix(PREFIX): array for name, array in file.items()}
