"""Write the training job once, run it on every PyTorch distributed engine, prove that each takes the same step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.job import Batch, Job, LRSchedule, Recipe

if TYPE_CHECKING:
    from samestep.data.arrays import Arrays
    from samestep.data.images import ImageFolder
    from samestep.data.pipeline import Pipeline
    from samestep.data.stream import Stream

__all__ = ["Arrays", "Batch", "ImageFolder", "Job", "LRSchedule", "Pipeline", "Recipe", "Stream"]
OF_DATA = {"Arrays": "arrays", "ImageFolder": "images", "Pipeline": "pipeline", "Stream": "stream"}  # name -> its file
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What is about data, imported when it is asked for: it stands above the plain values of a job."""
    if name in OF_DATA:
        return getattr(import_module(f"samestep.data.{OF_DATA[name]}"), name)
    raise AttributeError(f"module 'samestep' has no attribute '{name}'")
