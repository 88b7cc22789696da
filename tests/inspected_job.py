"""What an inspection finds of a job that is to be proven."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.records.inspection import EngineFacts, JobFacts, Question
from samestep.tasks.inspect.engines import NO_DEMANDS, EngineDemands, demands_of
from samestep.tasks.inspect.job import inspect_job


def inspected_job(
    job: str,
    settings: Mapping[str, str],
    replicas: int,
    *,
    steps: int | None = 8,
    proves: bool = True,
    engines: EngineDemands = NO_DEMANDS,
) -> JobFacts:
    """Inspects a job on a CPU. engines: what those of the command ask of it."""
    return inspect_job(Question(job, settings, steps=steps, proves=proves), replicas, "cpu", engines)


def demands(row: EngineFacts) -> EngineDemands:
    """What a command with one engine asks of a job."""
    return demands_of([row], Question(), "cpu")
