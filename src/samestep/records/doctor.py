"""What the doctor's processes and machines say to each other, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samestep.records.files import as_json
from samestep.world import checks
from samestep.world.checks import LaunchInfo, Status
from samestep.world.machine import Dialled, Flow, RankTried, Trial


@dataclass(frozen=True)
class ProbeQuestion:
    """Asks a worker for the facts of some checks."""

    info: LaunchInfo
    checks: tuple[str, ...]


@dataclass(frozen=True)
class Probed:
    """The facts of a check, as plain values. error: why there are none; '' where there are."""

    check: str
    facts: object = None
    error: str = ""

    @classmethod
    def of(cls, check: str, info: LaunchInfo) -> Probed:
        """Gathers a check's facts on this machine; a probe that fails must not hide the rest."""
        try:
            return cls(check, as_json(checks.probe(check, info)))
        except Exception as error:
            return cls(check, error=f"{type(error).__name__}: {error}")


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
    ranks: tuple[RankTried, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A finding of a check."""

    check: str
    group: str
    status: Status
    why: str
    fix: str = ""
    machine: str = ""


@dataclass(frozen=True)
class Report:
    """What the doctor found. facts: check -> what it was judged by, as plain values; of each machine, where a check
    looks at each."""

    machines: tuple[str, ...]
    findings: tuple[Judged, ...]
    seconds: float
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(each.status == "FAIL" for each in self.findings)
