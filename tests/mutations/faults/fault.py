"""Fault: a patch of a file of samestep, and what the proof must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planting import FileFault

ALL = ("conv", "tied", "transformer")


@dataclass(frozen=True)
class PlantedFault(FileFault):
    """A fault of samestep. named: the quantities that rightly name it. cause: ids of the message that explains it, as
    messages.explains takes them."""

    named: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Fault(PlantedFault):
    jobs: tuple[str, ...] = ALL
    needs: str = ""
    engine: str = "ddp"
    settings: Mapping[str, str] = field(default_factory=dict)
    mesh: str = ""  # how the ranks are arranged
    also: str = ""  # what of a proof it takes, as of ranks.reference_plan
    axes: tuple[str, ...] = ()  # of the mesh, which it takes; none: it is there on one rank, too
    modules: tuple[str, ...] = ()  # of which one is rightly named; none: no module is wrong before others


DDP, RUN, SCHEDULE = "engines/ddp.py", "training.py", "data/schedule.py"
LOADER, EVALUATE, STEP = "data/loader.py", "rank/evaluate.py", "rank/step.py"
WRAPPED = "        optimizer = job.optimizer.build(module)\n"
BACKWARD = "                loss.backward()\n"
COMPLETED = "            if batch.completes_step:\n"
