"""study.json: what decides the results in a folder, by which a resumed study is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

STUDY = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """What a command was asked, and the code that it runs.

    file: a digest of the job's file. package: of samestep's files. rounds, warmup_steps, measured_steps: see Setup.
    nproc: ranks on each of the `nnodes` machines. steps: of each training of the proof. threads: of each rank; 0: the
    machine's cores divided by its ranks. training: the options of a training or an evaluation, in words. resume: who
    continues the trainings of an interrupted proof, in words.
    """

    command: str
    job: str
    file: str
    samestep: str
    torch: str
    package: str
    settings: Mapping[str, str]
    engines: tuple[str, ...]
    launchers: tuple[str, ...]
    engine_settings: Mapping[str, str]
    device: str
    rounds: int
    warmup_steps: int
    measured_steps: int
    nproc: int
    nnodes: int
    steps: int
    threads: int
    training: str = ""
    resume: str = ""

    def differences(self, other: StudyRecord) -> list[str]:
        """Returns the names of the fields in which `other` differs."""
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]
