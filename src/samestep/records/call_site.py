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
]


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code. file: its absolute path. line: from 1. function: the name of what it is in.

    code: the line itself, without secrets, where it has been read.
    """

    file: str
    line: int
    function: str = ""
    code: str = ""


@dataclass(frozen=True)
class CallRecord:
    """A line of the user's code from which torch is called, and how often.

    call: what it does. name: the class or function that is called, as 'DistributedDataParallel' or 'all_reduce'; of a
    model that is not the outermost, its name in that. sites: the innermost line of the user's code, then its callers.
    number: of the loader, the optimizer, or the scheduler; -1 where that has none. first, last: how many optimizer
    steps had been taken at the first and the last call.
    """

    call: Call
    name: str
    sites: list[CallSite]
    number: int = -1
    first: int = 0
    last: int = 0
    count: int = 1


@dataclass(frozen=True)
class ChangedLines:
    """A place in a file that two sides have otherwise. text: its hunk of a unified diff, without the head. before: the
    file's name on the first side, '' where it has none; after: on the second. line: of the second, or of the first."""

    before: str
    after: str
    line: int
    text: str
