"""How the script's ranks divide the model into the stages of a pipeline, as samestep tried it in one process."""

from __future__ import annotations

from samestep.job import Job
from samestep.parallel.stage_plan import Cut, StagePlan

RANK_OF: list[int] = []  # of each stage, the place of the rank that has it
CUTS: tuple[Cut, ...] = ()  # where the stages begin, but for the first one
HOLDERS: dict[str, tuple[int, ...]] = {}  # a parameter or buffer -> the stages that use it
DRAWS = False  # random numbers are drawn after the first stage
CHANGES_ROWS = False  # the forward pass changes its rows in place


def ranks_of_stages(schedule: str, ranks: int, stages_per_rank: int) -> list[int]:
    """Returns the place of the rank that has each stage."""
    return RANK_OF


def stage_plan(job: Job, stages: int, device: str) -> StagePlan:
    """Returns where the stages of the job's model begin."""
    return StagePlan(CUTS, HOLDERS, DRAWS, CHANGES_ROWS)
