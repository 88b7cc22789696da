"""What is recorded between two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from samestep.recorder.sums import compress
from samestep.records.arrays import write_arrays
from samestep.records.script import LOCAL, MICRO_BATCHES, STEP, TAKEN, UNCLIPPED, ClipSeen, LossSeen, MicroSeen


@dataclass
class Micro:
    """One micro-batch, as it goes on."""

    rows: list[str] = field(default_factory=list)
    losses: list[LossSeen] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def seen(self) -> MicroSeen:
        return MicroSeen(self.rows, self.losses, self.passes)


@dataclass
class Window:
    """The micro-batches since the last optimizer step, and their gradients, compressed.

    done: micro-batches whose backward has ended. removed: those that zero_grad removed.
    local: parameter -> micro-batch -> this rank's gradient. unclipped: parameter -> .grad before it was clipped.
    """

    micro: list[Micro] = field(default_factory=list)
    done: int = 0
    removed: list[Micro] = field(default_factory=list)
    clips: list[ClipSeen] = field(default_factory=list)
    scale: float | None = None
    local: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    unclipped: dict[str, Tensor] = field(default_factory=dict)
    unclipped_after: int = -1
    calls: int = 0  # of the optimizer's closure
    dtypes: set[str] = field(default_factory=set)  # of the local gradients
    computed: set[str] = field(default_factory=set)  # the dtypes of autocast

    def current(self) -> Micro:
        """Returns the micro-batch whose backward has not ended; begins it where there is none."""
        if len(self.micro) == self.done:
            self.micro.append(Micro())
        return self.micro[-1]

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a local gradient of a parameter to that of the present micro-batch."""
        number = min(max(len(self.micro), 1), MICRO_BATCHES) - 1
        kept = self.local.setdefault(name, {})
        self.dtypes.add(str(gradient.dtype).removeprefix("torch."))
        compressed = compress(gradient)
        kept[number] = kept[number] + compressed if number in kept else compressed

    def computed_gradients(self) -> list[str]:
        """Returns the parameters whose local gradient is not zero."""
        return [name for name, of in self.local.items() if any(bool(each.any()) for each in of.values())]

    def begin_again(self) -> None:
        """Begins anew before a call of the optimizer's closure: the last call's gradients are those of the step."""
        self.clips, self.unclipped_after = [], -1
        self.calls += 1

    def clear(self) -> None:
        """Removes the micro-batches so far: their gradients will be in no step."""
        self.removed += self.micro[: self.done]
        self.micro, self.local, self.done = self.micro[self.done :], {}, 0

    def clips_seen(self) -> list[ClipSeen]:
        """Returns the clips. Where no backward() was seen, as by autograd.grad, none is known to be before it."""
        return self.clips if self.done else [replace(clip, after=len(self.micro)) for clip in self.clips]

    @property
    def cleared(self) -> int:
        """How many of the removed micro-batches are lost: those whose rows are in no gradient of the step.

        Sharpness-aware minimization computes a gradient that moves the weights, removes it, and takes the same rows'.
        """
        kept = {row for micro in self.micro for row in micro.rows}
        return sum(not micro.rows or not kept.issuperset(micro.rows) for micro in self.removed)

    def write(self, folder: Path, rank: int, step: int, taken: dict[str, Tensor]) -> None:
        """Writes the arrays of a step. taken: parameter -> the gradient that the optimizer took."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, gradient in taken.items():
            arrays[TAKEN.format(name)] = _array(gradient)
            for number, local in self.local.get(name, {}).items():
                arrays[LOCAL.format(number, name)] = _array(local)
            if name in self.unclipped:
                arrays[UNCLIPPED.format(name)] = _array(self.unclipped[name])
        write_arrays(folder / f"rank{rank}.{STEP.format(step)}.npz", arrays)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy().astype(np.float64)
