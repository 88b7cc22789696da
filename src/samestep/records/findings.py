"""What `samestep check`, `samestep check --against` and `samestep diff` find in the records of scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from samestep.message import Message
from samestep.records.call_site import CallSite, ChangedLines
from samestep.records.results import Divergence

Answer = Literal["right", "differs", "unknown", "warning"]  # a warning is of a finding alone: it may be intended
Question = Literal[
    "steps",
    "initial weights",
    "rows",
    "order",
    "gradient",
    "loss weight",
    "clipping",
    "rate",
    "schedule",
    "weights",
    "frozen weights",
    "updates",
    "random numbers",
    "evaluation",
    "buffers",
    "collectives",
    "saves",
    "replay",
    "replayed gradient",
    "replayed rate",
    "replayed weights",
    "replayed micro-batches",
    "micro-batches",
    "precision",
    "loss",
    "settings",
]


@dataclass(frozen=True)
class Finding:
    """The answer to one question about a script. message: what was seen, or why it cannot be judged.

    divergence: what differs first, of an answer that differs; its cause is the message. sites: the lines of the user's
    code where it arises, the likeliest first. remedy: of an unknown one, what it would take to judge it.
    patch: the lines to write instead, as a unified diff; '' where none is certain. expected_sites: the lines of what
    the script is compared with.
    """

    question: Question
    answer: Answer
    message: Message
    divergence: Divergence | None = None
    sites: list[CallSite] = field(default_factory=list)
    remedy: Message | None = None
    patch: str = ""
    expected_sites: list[CallSite] = field(default_factory=list)


@dataclass(frozen=True)
class FixRecord:
    """A copy of a script in which a finding is mended, and what the check of that copy says.

    id: of the finding's message. patch: as a unified diff. copy: the patched file. answer: of its check; None where
    that failed. left: the ids of what still differs, or is warned of.
    """

    id: str
    patch: str
    copy: str
    answer: Answer | None
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckResults:
    """The results of `samestep check`. answer: 'differs' where one finding differs; 'unknown' where none does, and one
    of the questions that a proof needs has no answer: `missing` lists these. steps: how many were recorded on every
    rank. fixes: the patches that were tried, each on top of those before it."""

    script: str
    arguments: list[str]
    ranks: int
    steps: int
    answer: Answer
    findings: list[Finding]
    first_divergence: Divergence | None
    record_share: float
    folder: str
    notes: list[Message] = field(default_factory=list)
    command: str = ""
    missing: list[Question] = field(default_factory=list)
    fixes: list[FixRecord] = field(default_factory=list)


@dataclass(frozen=True)
class DiffResults:
    """The results of `samestep diff`: as CheckResults, of the records in the folder `second` against `first`.

    resumed_at: steps of the first before the checkpoint with which the second began. changes: of `check --against`: the
    places that the two sides have otherwise, those nearest to the first difference before the others. more_changes: how
    many further ones there are. against: its first side, as it is named; folder: of its records."""

    first: str
    second: str
    steps: int
    answer: Answer
    findings: list[Finding]
    first_divergence: Divergence | None
    notes: list[Message] = field(default_factory=list)
    resumed_at: int = 0
    changes: list[ChangedLines] = field(default_factory=list)
    more_changes: int = 0
    against: str = ""
    folder: str = ""


def question_of(results: CheckResults | DiffResults) -> Question | Literal[""]:
    """Returns the question whose answer is the first divergence; '' where there is none."""
    first = results.first_divergence
    return next((finding.question for finding in results.findings if first and finding.divergence == first), "")
