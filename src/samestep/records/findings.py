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
    "evaluation values",
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
    """The answer to one question about a script."""

    question: Question
    """What was asked."""

    answer: Answer
    """What the records say. 'unknown' where they cannot be judged."""

    message: Message
    """What was seen, or why it cannot be judged."""

    divergence: Divergence | None = None
    """First difference, whose cause is `message`. None where the answer is not 'differs'."""

    sites: list[CallSite] = field(default_factory=list)
    """Lines of the user's code where the finding arises, the likeliest first. Empty: not known."""

    remedy: Message | None = None
    """What it would take to judge an answer that is 'unknown'. None for other answers, or where that is not known."""

    patch: str = ""
    """Lines to write instead, as a unified diff. '': no change is certain."""

    expected_sites: list[CallSite] = field(default_factory=list)
    """Lines of the code that the script is compared with. Empty: it is compared with no other code."""


@dataclass(frozen=True)
class FixRecord:
    """A copy of a script in which a finding is mended, and what the check of that copy says."""

    id: str
    """Id of the finding's message."""

    patch: str
    """What was changed in the copy, as a unified diff."""

    copy: str
    """Path of the patched file."""

    answer: Answer | None
    """Answer of the copy's check. None: the check failed."""

    left: list[str] = field(default_factory=list)
    """Ids of the messages of the copy's findings that differ or warn."""


@dataclass(frozen=True)
class CheckResults:
    """The results of `samestep check`."""

    script: str
    """Path of the script, or name of the module, that was checked."""

    arguments: list[str]
    """Arguments of the script, without secrets."""

    ranks: int
    """Number of ranks that were recorded."""

    steps: int
    """Number of optimizer steps that were recorded on every rank."""

    answer: Answer
    """'differs' where one finding differs. 'unknown' where none does, and a question in `missing` has no answer."""

    findings: list[Finding]
    """Answers to the single questions."""

    first_divergence: Divergence | None
    """Difference of the earliest step. None: no finding differs."""

    record_share: float
    """Share of the steps' time that recording took, as a fraction."""

    folder: str
    """Folder of the records."""

    notes: list[Message] = field(default_factory=list)
    """What to know about the ranks and the recording beside the findings."""

    command: str = ""
    """Command line as it was typed, without secrets. '' for samestep.watch, which has none."""

    missing: list[Question] = field(default_factory=list)
    """Questions that a proof needs and that have no answer."""

    fixes: list[FixRecord] = field(default_factory=list)
    """Patches that were tried, each on top of those before it. Empty: none was tried."""


@dataclass(frozen=True)
class DiffResults:
    """The results of `samestep diff` and `samestep check --against`: the records of a second side against a first."""

    first: str
    """Name of the first side, whose records are what is expected: their folder, or how the script was started."""

    second: str
    """Name of the second side, which is judged: the folder of its records, or how the script was started."""

    steps: int
    """Number of optimizer steps that were compared."""

    answer: Answer
    """'differs' where one finding differs. 'unknown' where none does, and a needed question has no answer."""

    findings: list[Finding]
    """Answers to the single questions."""

    first_divergence: Divergence | None
    """Difference of the earliest step. None: no finding differs."""

    notes: list[Message] = field(default_factory=list)
    """What to know about the two sides beside the findings."""

    resumed_at: int = 0
    """Number of steps that the first side took before the checkpoint with which the second began. 0: it began anew."""

    # Of `check --against` alone
    changes: list[ChangedLines] = field(default_factory=list)
    """Places where the code of the two sides differs, those nearest to the first difference before the others."""

    more_changes: int = 0
    """Number of further such places, which are not in `changes`."""

    against: str = ""
    """Name of the first side. '' for `samestep diff`."""

    folder: str = ""
    """Folder of both sides' records. '' for `samestep diff`."""


def question_of(results: CheckResults | DiffResults) -> Question | Literal[""]:
    """Returns the question whose answer is the first divergence; '' where there is none."""
    first = results.first_divergence
    return next((finding.question for finding in results.findings if first and finding.divergence == first), "")
