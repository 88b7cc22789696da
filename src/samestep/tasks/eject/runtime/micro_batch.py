"""MicroBatch: one rank's rows of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MicroBatch:
    """One rank's rows of one micro-batch. share: of the step's rows, times the number of ranks."""

    indices: np.ndarray[Any, Any]
    rows: int
    share: float = 1.0
    weight: float = 0.0
    epoch: int = 0
    step: int = 0
    micro: int = 0
    completes_step: bool = True
    completes_epoch: bool = False
    repeats: np.ndarray[Any, Any] | None = None
    phase: int = 0
