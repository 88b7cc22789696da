"""ResumeFault: a patch of a file of samestep, and what the proof of a resume must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mutations.faults.fault import RUN as RUN
from mutations.faults.fault import SCHEDULE as SCHEDULE
from mutations.faults.fault import PlantedFault

STATE, FILES, SAVING = "rank/checkpoint_state.py", "rank/checkpoint_files.py", "rank/checkpoint_state.py"


@dataclass(frozen=True)
class ResumeFault(PlantedFault):
    job: str = "alike"
    settings: Mapping[str, str] = field(default_factory=dict)
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    first: tuple[str, int] = ("ddp", 2)
    then: tuple[str, int] = ("ddp", 2)
    trainparity: str = ""
