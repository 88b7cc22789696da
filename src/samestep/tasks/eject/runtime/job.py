"""The job of a script: samestep has checked its values, so that a script holds the fields alone."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.job.fields import JobFields


@dataclass(frozen=True)
class Job(JobFields):
    """A training job."""
