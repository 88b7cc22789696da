"""A machine of the doctor, this one or another: it listens, connects, sends, and starts ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from samestep.world.network import Dialled

DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d{1,3}(,cuda:\d{1,3}){0,63}")
Failure = Literal["", "another program", "stopped", "miscounted", "lost"]


@dataclass(frozen=True)
class LaunchInfo:
    """The launch that the doctor examines, as one machine's options and environment describe it. The fields are those
    of launch.Machines and of the options.

    node: this machine's number; None: the rendezvous gives it one. started_by: the outer launcher; '' without one, and
    ranks_host, ranks_port: where rank 0 of a training that it starts listens; 0: the launcher itself does, or nobody.
    contradiction: what is wrong with the launcher's variables or the options; '' for nothing. connect_error: how the
    last attempt to connect to the rendezvous ended, where the machines have not met. prefixes: with which the names of
    launchers' variables begin.
    """

    nproc: int = 2
    nnodes: int = 1
    node: int | None = None
    master: str = "127.0.0.1"
    port: int = 0
    out: str = "runs"
    job: str = ""
    device: str = "auto"
    started_by: str = ""
    ranks_host: str = ""
    ranks_port: int = 0
    contradiction: str = ""
    connect_error: Dialled | None = None
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flow:
    """What arrived of a stream of bytes: `received` bytes in `seconds`, by the receiver's clock.

    failure: why it cannot be used; '' where it can. another program: has the port. stopped: for too long. miscounted:
    more arrived than was sent. lost: the connection ended; detail: the system's words.
    """

    received: int
    seconds: float
    failure: Failure = ""
    detail: str = ""

    @property
    def mbit_s(self) -> float:
        """Megabits (10^6) per second."""
        return self.received * 8 / 1e6 / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Trial:
    """Ranks that open a process group by env://, and run a fixed matmul and a fixed all-reduce.

    master, port: of their rendezvous. first_rank: of this machine's `local_size` ranks, of `size` ranks on all
    machines. variables: set in their environment. wait_s: how long a rank waits for the others.
    """

    master: str
    port: int
    size: int
    local_size: int
    first_rank: int
    variables: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    wait_s: float = 15.0


@dataclass(frozen=True)
class TrialRecord:
    """What one rank of a trial measured.

    error: the exception that it raised, or the last line that its process printed; '' where it succeeded. exit_code: of
    a process that ended without a record, negative for a signal. matmul_s: of a block of products, the best of some.
    all_reduce_s: of one all-reduce of 4 MiB, the median.
    """

    rank: int
    error: str = ""
    exit_code: int | None = None
    meet_s: float = 0.0
    matmul_s: float = 0.0
    all_reduce_s: float = 0.0
    backend: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.exit_code is not None


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

    def ended(self) -> tuple[TrialRecord, ...]:
        """Waits for the ranks that `start` has started, and returns what they measured."""
