"""What `samestep runs` reads and returns: the command that wrote a folder of results, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

COMMAND = "command.json"
Outcome = Literal["finished", "stopped", "failed", "interrupted", "killed", "running", "unknown"]


@dataclass(frozen=True)
class CommandRecord:
    """The command that writes a folder of results; written when it starts, and again at its end.

    words: the command line, without --out. cwd: where it was typed. started_at: Unix time, in seconds. outcome: None
    until it has ended. reason: the sentence that a failure printed.
    """

    words: tuple[str, ...]
    cwd: str
    started_at: float
    outcome: Literal["finished", "failed", "interrupted"] | None = None
    reason: str | None = None


@dataclass(frozen=True)
class PastRun:
    """One folder of results.

    ranks: over all machines, None where that is unknown. outcome: 'finished'; 'stopped', on request or by --patience;
    'failed', with its `reason`; 'interrupted'; 'killed', where nothing says how it ended; 'running'; or 'unknown',
    where its study.json cannot be read, with the `reason`. steps, asked_steps: of a training. evaluation: its latest.
    checkpoint: the folder of its newest one. line: the shell line that continues the run, where `continues`, or else
    repeats it.
    """

    folder: str
    command: str
    job: str
    engines: tuple[str, ...]
    ranks: int | None
    outcome: Outcome
    reason: str | None = None
    started_at: float | None = None
    steps: int | None = None
    asked_steps: int | None = None
    evaluation: Mapping[str, float] | None = None
    checkpoint: str | None = None
    line: str = ""
    continues: bool = False
