"""The records of `samestep collectives`: its plan, what the ranks observed and measured, and its results.

A planner reads the results: `read(CollectiveResults, path)`, then `curve("all_reduce").seconds(bytes)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from samestep.records.inspection import MachineFacts

PLAN = "collectives-plan.json"  # a worker knows by this name what to do

Tensors = list[list[float]]  # the elements of each tensor that a rank gives or gets; of a complex one, both parts


@dataclass(frozen=True)
class CollectivePlan:
    """What each rank does. out: the folder for its files. started_at: Unix time, in seconds.

    collectives: their names. backend: of torch.distributed. dtypes: to check; the first one is measured. sizes:
    in bytes, to measure; none: values alone. seconds: of each measurement, roughly. groups: whether sub-groups and
    device meshes are tried too. elements: of each part, where values are checked.
    """

    out: str
    started_at: float
    collectives: tuple[str, ...]
    backend: str
    dtypes: tuple[str, ...]
    reductions: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    seconds: float = 0.25
    groups: bool = True
    elements: int = 3


@dataclass(frozen=True)
class Case:
    """One call whose values are checked. dtype, reduction: '' where it has none. group: 'world', 'sub-group' or
    'mesh NAME'. members: the ranks of the group, in its order. root: the rank that gives or gets, of these."""

    collective: str
    dtype: str
    reduction: str
    group: str
    members: tuple[int, ...]
    root: int


@dataclass(frozen=True)
class RankValues:
    """The tensors of one rank before and after a call.

    before, after: the tensors that it gave and got. before_text, after_text: the same as Python shows it. error: what
    the call raised; '': nothing. called: False for a rank that has no part in it, as an odd one without a pair.
    """

    rank: int
    case: Case
    before: Tensors
    after: Tensors
    before_text: str = ""
    after_text: str = ""
    error: str = ""
    called: bool = True


@dataclass(frozen=True)
class Timed:
    """The seconds of one rank's calls of a collective with a message of `size` bytes, each after a barrier."""

    collective: str
    size: int
    seconds: list[float]


@dataclass(frozen=True)
class CollectiveRank:
    """What one rank observed. code: collective -> the source of the call. unmeasured: collective -> why it has no
    times."""

    held: list[RankValues] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """Calls with a message of `size` bytes. seconds: of each call, by the slowest rank.

    algorithm_bandwidth, bus_bandwidth: bytes per second, of the median; None for a collective without a message.
    """

    size: int
    seconds: list[float]
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class Piece:
    """seconds = latency + per_byte * bytes, for messages of first_size to last_size bytes.

    error: the greatest relative distance of the measured medians from it.
    """

    first_size: int
    last_size: int
    latency: float
    per_byte: float
    error: float


@dataclass(frozen=True)
class CollectiveCurve:
    """The measurement of one collective. pieces: a fit of the medians, in order of size; they do not overlap."""

    collective: str
    dtype: str
    points: list[Point]
    pieces: list[Piece]

    def seconds(self, size: int) -> float:
        """Returns the time of a call with `size` bytes by the fit; beyond the measured sizes, by the nearest piece."""
        piece = next((curve for curve in self.pieces if size <= curve.last_size), self.pieces[-1])
        return piece.latency + piece.per_byte * size


@dataclass(frozen=True)
class WrongValue:
    """A call that gave a wrong value. expected, found: what `rank` should have got and what it got, as text."""

    collective: str
    dtype: str
    reduction: str
    group: str
    rank: int
    expected: str
    found: str


@dataclass(frozen=True)
class Unsupported:
    """What a backend does not support: each of these dtypes with each of these reductions.

    dtypes, reductions: empty where there are none. why: the first line of its first error. instead: what to use.
    """

    collectives: tuple[str, ...]
    dtypes: tuple[str, ...]
    reductions: tuple[str, ...]
    why: str
    instead: str


@dataclass(frozen=True)
class CollectiveResults:
    """The results of `samestep collectives`. checked: how many calls had the right values on every rank.

    started: local time, as ISO 8601. unmeasured: collective -> why it has no curve.
    failed: those of them whose values were right.
    """

    samestep: str
    command: str
    started: str
    backend: str
    device: str
    launcher: str
    world_size: int
    machines: int
    machine: MachineFacts
    checked: int
    wrong: list[WrongValue]
    unsupported: list[Unsupported]
    curves: list[CollectiveCurve]
    unmeasured: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def curve(self, collective: str) -> CollectiveCurve | None:
        """Returns the measurement of a collective; None where it has none."""
        return next((curve for curve in self.curves if curve.collective == collective), None)
