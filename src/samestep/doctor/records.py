"""What the doctor's processes and machines say to each other, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samestep.doctor.machine import Flow, LaunchInfo, Trial, TrialRecord
from samestep.doctor.probe import Finding, MachineProbe
from samestep.doctor.probes import PROBES
from samestep.records.files import as_json
from samestep.world.network import Dialled


@dataclass(frozen=True)
class ProbeQuestion:
    """Asks a worker for the facts of some probes."""

    info: LaunchInfo
    probes: tuple[str, ...]


@dataclass(frozen=True)
class Probed:
    """The facts of a probe, as plain values. error: why there are none; '' where there are."""

    probe: str
    facts: object = None
    error: str = ""

    @classmethod
    def on_this_machine(cls, name: str, info: LaunchInfo) -> Probed:
        """Gathers the facts of a probe; one that fails must not hide the rest."""
        probe = PROBES[name]
        assert isinstance(probe, MachineProbe)
        try:
            return cls(name, as_json(probe.gather(info)))
        except Exception as error:
            return cls(name, error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Probes:
    """The answer to a ProbeQuestion."""

    probed: tuple[Probed, ...]


@dataclass(frozen=True)
class TrialRank:
    """What one rank of a trial is told. listening: the descriptor of the socket that rank 0 inherits for its store."""

    trial: Trial
    rank: int
    listening: int | None = None


@dataclass(frozen=True)
class Greeting:
    """The message of a machine that connects to the first one. node: its --node-rank. nproc: its ranks."""

    name: str
    node: int | None
    nproc: int
    probed: tuple[Probed, ...]


@dataclass(frozen=True)
class Request:
    """What the first machine asks another to do. The fields are the arguments of Machine's methods. code: with 'stop',
    the exit code. ports: with 'meet', each machine's address and the port at which it counts."""

    do: Literal["listen", "meet", "dial", "send", "now", "interfaces", "start", "ended", "stop"]
    ports: tuple[tuple[str, int], ...] = ()
    address: str = ""
    port: int = 0
    seconds: float = 0.0
    trial: Trial | None = None
    code: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer to a Request: the field that it asks for."""

    port: int = 0
    seconds: float = 0.0
    dialled: Dialled | None = None
    flow: Flow | None = None
    names: tuple[str, ...] = ()
    ranks: tuple[TrialRecord, ...] = ()


@dataclass(frozen=True)
class Report:
    """What the doctor found. facts: probe -> what it was judged by, as plain values; of each machine, where a probe
    looks at each."""

    machines: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(finding.status == "FAIL" for finding in self.findings)
