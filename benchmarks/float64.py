"""The built-in jobs with a model in float64: rounding is then too small to be seen in the curves of jobs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import samestep.jobs.cifar10
import samestep.jobs.imagefolder
import samestep.jobs.imdb
from samestep import Job


def in_float64(function: Callable[..., Job]) -> Callable[..., Job]:
    @wraps(function)
    def job(**settings: Any) -> Job:
        made = function(**settings)
        return replace(made, model=lambda: made.model().double())  # pixels and tokens are cast by the models

    return job


cifar10 = in_float64(samestep.jobs.cifar10.job)
imagefolder = in_float64(samestep.jobs.imagefolder.job)
imdb = in_float64(samestep.jobs.imdb.job)
