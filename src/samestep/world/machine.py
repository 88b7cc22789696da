"""The doctor's interface of a machine, this one or another: it listens, connects, sends, and starts ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Outcome = Literal["open", "refused", "dropped", "no route", "unknown name", "error"]


@dataclass(frozen=True)
class Dialled:
    """How a connection to a port ended. dropped: nothing answered in time, as behind a firewall that drops. seconds:
    until it was open, or until it failed."""

    outcome: Outcome
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Flow:
    """What arrived of a stream of bytes: `received` bytes in `seconds`, by the receiver's clock. error: '' for none."""

    received: int
    seconds: float
    error: str = ""

    @property
    def mbit_s(self) -> float:
        """Megabits (10^6) per second."""
        return self.received * 8 / 1e6 / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Trial:
    """Ranks that open a process group by env://, and run a fixed matmul and a fixed all-reduce.

    master, port: of their rendezvous. first: the number of this machine's first rank, of `size` ranks on all machines.
    here: how many of them are on this machine. variables: set in their environment. wait_s: how long a rank waits for
    the others.
    """

    master: str
    port: int
    size: int
    here: int
    first: int
    variables: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    wait_s: float = 15.0


@dataclass(frozen=True)
class RankTried:
    """What one rank of a trial saw. error: '' where it succeeded. matmul_s: of a block of products, the best of some.
    all_reduce_s: of one all-reduce of 4 MiB, the median."""

    rank: int
    error: str = ""
    meet_s: float = 0.0
    matmul_s: float = 0.0
    all_reduce_s: float = 0.0
    backend: str = ""


class Machine(Protocol):
    """A machine of the doctor's. address: by which the others reach it. Each call raises ConnectionError where the
    machine is lost."""

    name: str
    address: str
    nproc: int

    def listen(self) -> int:
        """Opens a random port, which takes connections and counts what arrives. Returns its number."""

    def dial(self, address: str, port: int) -> Dialled: ...

    def send(self, address: str, port: int, seconds: float) -> Flow: ...

    def now(self) -> float:
        """Returns the machine's clock: seconds since 1970."""

    def interfaces(self) -> tuple[str, ...]:
        """Returns the names of the interfaces that are up and have an address, the one towards the master first."""

    def free_port(self) -> int: ...

    def start(self, trial: Trial) -> None:
        """Starts the machine's ranks of a trial."""

    def ended(self) -> tuple[RankTried, ...]:
        """Waits for the ranks that `start` has started, and returns what they saw."""
