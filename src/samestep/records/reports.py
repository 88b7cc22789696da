"""The numbers that a script reports of an evaluation, as records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from samestep.records.call_site import CallSite

# "metric": what Lightning takes for the value of an evaluation. "plateau": a ReduceLROnPlateau decides by it.
# "collective": the rank hands the numbers to others.
ReportCall = Literal["print", "log", "metric", "plateau", "collective"]
# A number that stands alone in a text, and not in a word, as in resnet50.
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan\b|inf\b)")


@dataclass(frozen=True)
class ReportRecord:
    """Numbers that the script reports by one call, between a forward pass of an evaluation and the next training
    forward."""

    call: ReportCall
    """What the script calls."""

    sites: list[CallSite]
    """Innermost line of the user's code, then the lines of its callers."""

    step: int
    """Number of optimizer steps that were taken before."""

    text: str
    """Digest of what is reported beside the numbers."""

    numbers: list[str]
    """The numbers, as they are reported."""

    draws: bool = False
    """Whether a forward pass of the evaluation has drawn random numbers."""
