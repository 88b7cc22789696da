"""Write the training job once, run it on every PyTorch distributed engine, prove that each takes the same step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.job import Batch, Job, LRSchedule, Recipe

if TYPE_CHECKING:
    from samestep.data.pipeline import Pipeline

__all__ = ["Batch", "Job", "LRSchedule", "Pipeline", "Recipe"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Pipeline`, imported when it is asked for: it stands above the plain values of a job."""
    if name == "Pipeline":
        return import_module("samestep.data.pipeline").Pipeline
    raise AttributeError(f"module 'samestep' has no attribute '{name}'")
