"""Write the training job once, run it on every PyTorch distributed engine, prove that each takes the same step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

if TYPE_CHECKING:
    from samestep.commands.api import collectives, compare, evaluate, run, runs, verify
    from samestep.commands.machine_options import MachineOptions
    from samestep.data.arrays import Arrays, Windows
    from samestep.data.images import ImageFolder
    from samestep.data.pipeline import Pipeline
    from samestep.data.stream import Stream
    from samestep.errors import TrainingFailed, UserError
    from samestep.job import Batch, ByLength, Job, Lanes, LRSchedule, Phase, Recipe, StepInfo, Weighted
    from samestep.recorder.watch import watch
    from samestep.records.collectives import CollectiveResults
    from samestep.records.findings import CheckResults
    from samestep.records.results import CompareResults, Verdict
    from samestep.records.run_results import EvaluateResults, RunResults
    from samestep.records.runs import PastRun

__all__ = [
    "Arrays",
    "Batch",
    "ByLength",
    "CheckResults",
    "CollectiveResults",
    "CompareResults",
    "EvaluateResults",
    "ImageFolder",
    "Job",
    "LRSchedule",
    "Lanes",
    "MachineOptions",
    "PastRun",
    "Phase",
    "Pipeline",
    "Recipe",
    "RunResults",
    "StepInfo",
    "Stream",
    "TrainingFailed",
    "UserError",
    "Verdict",
    "Weighted",
    "Windows",
    "__version__",
    "collectives",
    "compare",
    "evaluate",
    "run",
    "runs",
    "verify",
    "watch",
]
LATER = {  # name -> its module, imported at its first use: nobody needs all of them, and the pytest plugin needs none
    "Arrays": "data.arrays",
    "Batch": "job",
    "ByLength": "job",
    "CheckResults": "records.findings",
    "CollectiveResults": "records.collectives",
    "ImageFolder": "data.images",
    "Job": "job",
    "LRSchedule": "job",
    "Lanes": "job",
    "MachineOptions": "commands.machine_options",
    "PastRun": "records.runs",
    "Phase": "job",
    "Pipeline": "data.pipeline",
    "Recipe": "job",
    "EvaluateResults": "records.run_results",
    "StepInfo": "job",
    "Stream": "data.stream",
    "CompareResults": "records.results",
    "RunResults": "records.run_results",
    "TrainingFailed": "errors",
    "UserError": "errors",
    "Verdict": "records.results",
    "Weighted": "job",
    "Windows": "data.arrays",
    "collectives": "commands.api",
    "compare": "commands.api",
    "evaluate": "commands.api",
    "run": "commands.api",
    "runs": "commands.api",
    "verify": "commands.api",
    "watch": "recorder.watch",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        value = getattr(import_module(f"samestep.{LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'samestep' has no attribute '{name}'")
