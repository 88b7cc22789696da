"""Records what is between two optimizer steps: micro-batches, and a few sums of each of their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.job.foreign import is_a
from samestep.records.script import (
    BUCKETS,
    LOCAL,
    MICRO_BATCHES,
    STEP,
    TAKEN,
    UNCLIPPED,
    ClipRecord,
    LossRecord,
    MicroBatchRecord,
)
from samestep.records.tensor_files import write_arrays

PERIOD = 65537  # prime, so that no two elements of a bucket have the same sign throughout


# Numbers that are added up at a time: on a CPU as many as its cache holds, elsewhere as many as hide a kernel's start.
CHUNK_ON_CPU, CHUNK_ELSEWHERE = 1 << 16, 1 << 22


def _chunk_of(device: torch.device) -> int:
    return CHUNK_ON_CPU if device.type == "cpu" else CHUNK_ELSEWHERE


@cache
def _signs(device: torch.device) -> Tensor:
    """Returns PERIOD random signs, the same on every rank, again and again: enough for a chunk that begins anywhere."""
    generator = torch.Generator().manual_seed(20251123)
    signs = (torch.randint(0, 2, (PERIOD,), generator=generator) * 2 - 1).double()
    return signs.repeat(2 + _chunk_of(device) // PERIOD).to(device)


def compress(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements where it has BUCKETS or fewer; otherwise BUCKETS sums of them, with random signs.

    The result is linear in the tensor, so that the mean over ranks is that of the whole gradients; in float64, of shape
    [min(elements, BUCKETS)], on the tensor's device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_sparse:
        flat = flat.to_dense()
    count = flat.numel()
    if count <= BUCKETS:
        return flat.double().clone()
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    signs, length = _signs(flat.device), _chunk_of(flat.device)
    chunk = torch.empty(min(length, count), dtype=torch.float64, device=flat.device)
    for start in range(0, count, length):
        size = min(length, count - start)
        part = chunk[:size].copy_(flat[start : start + size])
        part.mul_(signs[start % PERIOD : start % PERIOD + size])
        whole = size - size % BUCKETS
        sums += part[:whole].view(-1, BUCKETS).sum(0)
        sums[: size - whole] += part[whole:]
    return sums


def dtype_name(tensor_or_dtype: Tensor | torch.dtype) -> str:
    """Returns 'float32' of torch.float32 or of a tensor of it."""
    dtype = tensor_or_dtype.dtype if is_a(tensor_or_dtype, Tensor) else tensor_or_dtype
    return str(dtype).removeprefix("torch.")


@dataclass
class MicroBatch:
    """One micro-batch that is being computed."""

    rows: list[str] = field(default_factory=list)
    """Digests of the rows that the model received."""

    losses: list[LossRecord] = field(default_factory=list)
    """The terms of the loss."""

    passes: list[int] = field(default_factory=list)
    """The numbers of the passes over loaders whose batches the micro-batch used."""

    forwards: int = 0
    """How many forward passes the micro-batch has had."""

    value: float | None = None
    """The value of the loss that was given to backward(). None: it is no scalar, or backward() was not called yet."""

    other_inputs: list[str] = field(default_factory=list)
    """Digests of the inputs that are no rows."""

    targets: list[str] = field(default_factory=list)
    """Digests of the targets of the loss."""

    modes: dict[str, bool] = field(default_factory=dict)
    """Layer -> whether it was in training mode at the backward pass."""

    def record(self) -> MicroBatchRecord:
        return MicroBatchRecord(
            rows=self.rows,
            losses=self.losses,
            passes=self.passes,
            forwards=self.forwards,
            value=self.value,
            other_inputs=self.other_inputs,
            targets=self.targets,
        )


@dataclass
class Window:
    """The micro-batches since the last optimizer step, and their gradients, compressed."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    """The micro-batches whose gradients are kept, in order."""

    done: int = 0
    """The number of these micro-batches whose backward pass has ended."""

    removed: list[MicroBatch] = field(default_factory=list)
    """The micro-batches that zero_grad removed."""

    clips: list[ClipRecord] = field(default_factory=list)
    """The calls of functions that clip gradients."""

    scale: float | None = None
    """The gradient scaler's factor. None: no scaler has divided the gradients."""

    local: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Parameter -> number of the micro-batch -> this rank's own gradient."""

    unclipped: dict[str, Tensor] = field(default_factory=dict)
    """Parameter -> its .grad before it was clipped."""

    unclipped_after: int = -1
    """How many micro-batches had ended when `unclipped` was taken. -1: nothing was clipped."""

    calls: int = 0
    """How often the optimizer has called its closure."""

    dtypes: set[str] = field(default_factory=set)
    """The dtypes of the gradients in `local`."""

    autocast: set[str] = field(default_factory=set)
    """The dtypes in which autocast has computed."""

    gathers: int = 0
    """The number of calls that gathered tensors with a gradient: see StepRecord."""

    cut_gathers: int = 0
    """The number of places in the losses' graphs where what was gathered has a gradient for this rank's part alone: see
    StepRecord."""

    own_statistics: bool = False
    """Whether the loss normalises this rank's rows by their own deviation: see StepRecord."""

    late_clips: int = 0
    """The number of clippings of gradients that a step had taken already: see StepRecord."""

    unawaited: int = 0
    """The number of reductions that were not awaited in time: see StepRecord."""

    returned: set[Any] = field(default_factory=set)
    """The nodes of the graph of what modules have returned, in the first step."""

    def current(self) -> MicroBatch:
        """Returns the micro-batch whose backward has not ended; begins it where there is none."""
        if len(self.micro_batches) == self.done:
            self.micro_batches.append(MicroBatch())
        return self.micro_batches[-1]

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a local gradient of a parameter to that of the present micro-batch."""
        number = min(max(len(self.micro_batches), 1), MICRO_BATCHES) - 1
        sums = self.local.setdefault(name, {})
        self.dtypes.add(dtype_name(gradient))
        compressed = compress(gradient)
        sums[number] = sums[number] + compressed if number in sums else compressed

    def computed_gradients(self) -> list[str]:
        """Returns the parameters whose local gradient is not zero."""
        return [name for name, sums in self.local.items() if any(bool(gradient.any()) for gradient in sums.values())]

    def begin_again(self) -> None:
        """Begins anew before a call of the optimizer's closure: the last call's gradients are those of the step."""
        self.clips, self.unclipped_after = [], -1
        self.calls += 1

    def clear(self) -> None:
        """Removes the micro-batches so far: their gradients will be in no step."""
        if not self.done:
            self.late_clips += sum(clip.parameters > 0 for clip in self.clips)
        self.removed += self.micro_batches[: self.done]
        self.micro_batches, self.local, self.done = self.micro_batches[self.done :], {}, 0
        # A step that a gradient scaler has skipped leaves these.
        self.clips, self.unclipped, self.unclipped_after = [], {}, -1

    @property
    def modes(self) -> dict[str, bool]:
        """Layer -> whether it was in training mode at each backward pass."""
        modes: dict[str, bool] = {}
        for micro_batch in self.micro_batches:
            modes |= {name: mode and modes.get(name, True) for name, mode in micro_batch.modes.items()}
        return modes

    def clip_records(self) -> list[ClipRecord]:
        """Returns the clips. Where no backward() was seen, as by autograd.grad, none is known to be before it."""
        return self.clips if self.done else [replace(clip, after=len(self.micro_batches)) for clip in self.clips]

    @property
    def cleared(self) -> int:
        """How many of the removed micro-batches are lost: those whose rows are in no gradient of the step.

        Sharpness-aware minimization computes a gradient that moves the weights, removes it, and takes the same rows'.
        """
        trained = {row for micro_batch in self.micro_batches for row in micro_batch.rows}
        return sum(not micro_batch.rows or not trained.issuperset(micro_batch.rows) for micro_batch in self.removed)

    def write(
        self, folder: Path, rank: int, step: int, taken: Mapping[str, Tensor], sums: Mapping[str, Tensor]
    ) -> None:
        """Writes the arrays of a step. taken: parameter -> the gradient that the optimizer took. sums: further arrays,
        by their names in the file."""
        arrays: dict[str, NDArray[Any]] = {name: _array(array) for name, array in sums.items()}
        for name, gradient in taken.items():
            arrays[TAKEN.format(name)] = _array(gradient)
            for number, local in self.local.get(name, {}).items():
                arrays[LOCAL.format(number, name)] = _array(local)
            if name in self.unclipped:
                arrays[UNCLIPPED.format(name)] = _array(self.unclipped[name])
        write_arrays(folder / f"rank{rank}.{STEP.format(step)}.npz", arrays)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy().astype(np.float64)
