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
    """The command that writes a folder of results. The record is written when the command starts, and again when it
    ends."""

    words: tuple[str, ...]
    """The words of the command line, without --out."""

    cwd: str
    """The folder in which the command was typed."""

    started_at: float
    """When the command started, in seconds of Unix time."""

    outcome: Literal["finished", "failed", "interrupted"] | None = None
    """How the command ended; None: it has not ended yet."""

    reason: Message | None = None
    """The message that a failure printed; None: nothing failed."""


@dataclass(frozen=True)
class ResultsIdentity:
    """What decides a command's results: its options, and the code that it runs."""

    command: str
    """The command's name, such as 'verify'."""

    job: str
    """The job's name or path, or the script of `check`."""

    samestep: str
    """The version of samestep."""

    nproc: int
    """The number of ranks on each machine."""

    nnodes: int = 1
    """The number of machines."""

    file: str = ""
    """A digest of the job's file and of the modules beside it; '': the command trains no job."""

    torch: str = ""
    """The version of torch; '': not recorded."""

    package: str = ""
    """A digest of samestep's own files; '': not recorded."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """The job's settings as --set gives them, without secrets: name -> text."""

    engines: tuple[str, ...] = ()
    """The names of the engines; empty: all engines."""

    launchers: tuple[str, ...] = ()
    """The names of the launchers; empty: the first launcher of each engine."""

    engine_settings: Mapping[str, str] = field(default_factory=dict)
    """The engines' settings as --set-engine gives them, without secrets: name -> text."""

    device: str = ""
    """The device as --device gives it."""

    rounds: int = 0
    """The number of measured launches of each engine, as Setup.rounds; 0: nothing is measured."""

    warmup_steps: int = 0
    """The number of first steps of a measured launch that are discarded."""

    measured_steps: int = 0
    """The number of steps of a measured launch that count."""

    steps: int = 0
    """The number of optimizer steps of each training of the proof."""

    threads: int = 0
    """The number of threads of each rank; 0: the machine's cores divided by its ranks."""

    training: str = ""
    """The options of a training, of an evaluation or of collectives, in words; '': none."""

    resume: str = ""
    """What continues the trainings of an interrupted proof, in words; '': the proof is not interrupted."""

    as_threads: bool = False
    """Whether the ranks are threads of one process."""

    quick: bool = False
    """Whether the proof is the short one, as Setup.quick."""

    also: int = 0
    """The second number of ranks; 0: there is none."""

    mesh: str = ""
    """How the ranks are arranged, as --mesh gives it; '': as each engine arranges them."""

    def differences(self, identity: ResultsIdentity) -> list[str]:
        """Returns the names of the fields in which `other` differs."""
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(identity, name)]


@dataclass(frozen=True)
class PastRun:
    """One folder of results, as `samestep runs` lists it."""

    folder: str
    """The path of the folder."""

    command: str
    """The name of the command that wrote the folder; '?': unknown."""

    job: str
    """The job's name or path, or the script of `check`; '?': unknown."""

    engines: tuple[str, ...]
    """The names of the engines; ('all',) for a proof of all engines; empty: no engines, or unknown ones."""

    ranks: int | None
    """The number of ranks over all machines; None: unknown."""

    outcome: Outcome
    """'finished'; 'stopped', on request or by --patience; 'failed'; 'interrupted'; 'killed', where nothing says how the
    command ended; 'running'; or 'unknown', where study.json cannot be read."""

    reason: Message | None = None
    """Why the command failed or stopped, why study.json cannot be read, or how many engines had each verdict; None:
    there is nothing to say."""

    started_at: float | None = None
    """When the command started, in seconds of Unix time; None: unknown."""

    steps: int | None = None
    """The number of optimizer steps that the training has done; None: no training, or unknown."""

    asked_steps: int | None = None
    """The number of optimizer steps of the whole training; None: no training, or unknown."""

    evaluation: Mapping[str, float] | None = None
    """The latest evaluation, metric -> value; None: there is none."""

    checkpoint: str | None = None
    """The folder of the newest complete checkpoint; None: there is none."""

    line: str = ""
    """The shell line that continues the run where `continues` is True, and else repeats it; '': unknown."""

    continues: bool = False
    """Whether `line` continues the run instead of repeating it."""
