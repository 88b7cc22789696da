"""The facts in a folder of results: the command that wrote it, the options that decide its results, and how it
ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from samestep.message import Message

COMMAND = "command.json"
STUDY = "study.json"  # of a ResultsIdentity, by which a command that is given again recognises its results
Outcome = Literal["finished", "stopped", "failed", "interrupted", "killed", "running", "unknown"]


@dataclass(frozen=True)
class CommandRecord:
    """The command that writes a folder of results; written when it starts, and again at its end.

    words: the command line, without --out. cwd: where it was typed. started_at: Unix time, in seconds. outcome: None
    until it has ended. reason: what a failure printed.
    """

    words: tuple[str, ...]
    cwd: str
    started_at: float
    outcome: Literal["finished", "failed", "interrupted"] | None = None
    reason: Message | None = None


@dataclass(frozen=True)
class ResultsIdentity:
    """The options of a command and the code that it runs: what decides its results.

    job: or the script of `check`. file: a digest of the job's file. package: of samestep's files. rounds, warmup_steps,
    measured_steps: see Setup. nproc: ranks on each of the `nnodes` machines. steps: of each training of the proof.
    threads: of each rank; 0: the machine's cores divided by its ranks. training: the options of a training, of an
    evaluation or of collectives, in words. resume: who continues the trainings of an interrupted proof, in words.
    as_threads: whether the ranks are threads of one process. quick: whether the proof is the short one.
    also: the second number of ranks; 0: there is none.
    mesh: of --mesh.
    """

    command: str
    job: str
    samestep: str
    nproc: int
    nnodes: int = 1
    file: str = ""
    torch: str = ""
    package: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    rounds: int = 0
    warmup_steps: int = 0
    measured_steps: int = 0
    steps: int = 0
    threads: int = 0
    training: str = ""
    resume: str = ""
    as_threads: bool = False
    quick: bool = False
    also: int = 0
    mesh: str = ""

    def differences(self, identity: ResultsIdentity) -> list[str]:
        """Returns the names of the fields in which `other` differs."""
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(identity, name)]


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
    reason: Message | None = None
    started_at: float | None = None
    steps: int | None = None
    asked_steps: int | None = None
    evaluation: Mapping[str, float] | None = None
    checkpoint: str | None = None
    line: str = ""
    continues: bool = False
