"""What plans of how ranks divide a model are tried on, in one process: a few rows, and when two values are the same."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samestep.data.loader import Rows, to_device
from samestep.data.schedule import schedule_of
from samestep.job import Batch, Job


def first_rows(job: Job, count: int, device: str) -> Batch:
    """Returns at most `count` rows of the job's first batch."""
    micro_batch = schedule_of(job, 1).step(0, 0, 0)[0]
    micro_batch = replace(micro_batch, indices=micro_batch.indices[:count], rows=min(micro_batch.rows, count))
    return Batch(to_device(Rows(job)[micro_batch][1], device), micro_batch)


def without_compiling() -> AbstractContextManager[Any]:
    """Lets compiled code run as it is written. What inspects a job has not imported dynamo, which takes a second, and
    compiles nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_close(expected: Any, given: Any, *, tolerance: float) -> bool:
    """Returns whether two values are equal up to rounding. tolerance: a share of the largest finite magnitude."""
    if not (isinstance(expected, Tensor) and isinstance(given, Tensor)):
        return type(expected) is type(given)
    if expected.shape != given.shape:
        return False
    if not expected.is_floating_point():
        return bool((expected == given).all())
    finite = expected.detach()[expected.isfinite()].double()
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(expected.double(), given.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True)
