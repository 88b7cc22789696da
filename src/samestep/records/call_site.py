"""Lines of the user's code, as records and findings name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a recorded line does: it makes an object, calls a method of one, or calls a function of torch.
Call = Literal[
    "model",
    "wrapper",
    "loader",
    "sampler",
    "optimizer",
    "scheduler",
    "set_epoch",
    "iteration",
    "forward",
    "frozen forward",
    "evaluation",
    "backward",
    "clip",
    "optimizer step",
    "scheduler step",
    "zero_grad",
    "collective",
    "save",
    "seed",
    "pipeline stage",
    "pipeline schedule",
    "pipeline step",
    "leave",
]


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code."""

    file: str
    """Absolute path of the file."""

    line: int
    """Number of the line, from 1."""

    function: str = ""
    """Name of the function or class that the line is in. '': not known."""

    code: str = ""
    """Text of the line, without secrets. '': it was not read."""


@dataclass(frozen=True)
class CallRecord:
    """A line of the user's code from which torch is called, and how often."""

    call: Call
    """What the line does."""

    name: str
    """Class or function that is called, as 'DistributedDataParallel' or 'all_reduce'. For the line that makes a model:
    '' where the model is the outermost one, else its name in that."""

    sites: list[CallSite]
    """Innermost line of the user's code, then the lines of its callers."""

    number: int = -1
    """Number of the loader, the optimizer or the scheduler that the line makes or calls. -1: it has none."""

    first: int = 0
    """Number of optimizer steps that were taken before the first call."""

    last: int = 0
    """Number of optimizer steps that were taken before the last call."""

    count: int = 1
    """Number of calls."""


@dataclass(frozen=True)
class ChangedLines:
    """A place in a file where two sides differ."""

    before: str
    """Name of the file on the first side. '': the first side has no such file."""

    after: str
    """Name of the file on the second side. '': the second side has no such file."""

    line: int
    """First line that differs, from 1: in the second side's file, or in the first side's where the second has none."""

    text: str
    """Hunk of a unified diff, without its head."""
