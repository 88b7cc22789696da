"""Write the training job once, run it on every PyTorch distributed engine, prove that each takes the same step."""

from samestep.job import Batch, Job, LRSchedule, Recipe

__all__ = ["Batch", "Job", "LRSchedule", "Recipe"]
__version__ = "0.1.0"
