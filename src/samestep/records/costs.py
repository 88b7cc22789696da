"""What one step costs a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeakMemory:
    """The bytes of a rank's tensors in a step. total: at once, at most.

    parameters: with buffers. gradients: when the optimizer steps. optimizer: its state. others: at the peak:
    activations, their gradients, batches, and what is sent.
    """

    parameters: int
    gradients: int
    optimizer: int
    others: int
    total: int


@dataclass(frozen=True)
class StepCost:
    """What one step costs a rank. sent: axis of the mesh -> bytes; of a group over several axes, their names with ×
    between them. bubble: the share of the step in which no stage of a pipeline computes; None: it has no stages, or
    they are threads of one process."""

    memory: PeakMemory
    sent: Mapping[str, int] = field(default_factory=dict)
    bubble: float | None = None
