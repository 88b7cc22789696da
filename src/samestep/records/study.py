"""study.json: what decides the results in a folder, by which a resumed study is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

STUDY = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """The options of a command and the code that it runs: what decides its results.

    job: or the script of `check`. file: a digest of the job's file. package: of samestep's files. rounds, warmup_steps,
    measured_steps: see Setup. nproc: ranks on each of the `nnodes` machines. steps: of each training of the proof.
    threads: of each rank; 0: the machine's cores divided by its ranks. training: the options of a training, of an
    evaluation or of collectives, in words. resume: who continues the trainings of an interrupted proof, in words.
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

    def differences(self, other: StudyRecord) -> list[str]:
        """Returns the names of the fields in which `other` differs."""
        names = [each.name for each in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]
