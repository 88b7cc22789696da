"""The collectives of torch.distributed: what each does, and the records of `samestep collectives`.

A planner reads the results: `read(CollectiveResults, path)`, then `curve("all_reduce").seconds(bytes)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from samestep.errors import UserError, nearest_name
from samestep.message import message
from samestep.records.inspection import MachineFacts

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # of torch.distributed.ReduceOp
BITS = ("band", "bor", "bxor")
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)
BYTES = dict(zip(DTYPES, (8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16)))  # of an element
FLOATING = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
BACKENDS = ("gloo", "nccl", "mpi")

Factor = Literal["2(n-1)/n", "(n-1)/n", "1", ""]
Kind = Literal["reduce", "one", "all", "pair", "wait"]
KINDS: Mapping[str, str] = {
    "reduce": "Reductions",
    "one": "From one rank, or to one",
    "all": "From all ranks to all",
    "pair": "Between two ranks",
    "wait": "Waiting",
}


@dataclass(frozen=True)
class Collective:
    """One collective.

    does: a sentence. kind: a key of KINDS. bus_factor: the bus bandwidth over the algorithm bandwidth, for n ranks, as
    nccl-tests defines it; '' where nothing is measured in bytes. instead: backend -> what to use where it has none.
    objects: whether it takes Python objects. chunks: whether the size that counts is that of n parts, one for each
    rank, as nccl-tests counts it.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and for send/recv, gather and scatter
    the function GetBw of src/sendrecv.cu, src/gather.cu and src/scatter.cu there.
    """

    name: str
    does: str
    kind: Kind
    bus_factor: Factor
    instead: Mapping[str, str] = field(default_factory=dict)
    objects: bool = False
    chunks: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it takes a ReduceOp."""
        return self.kind == "reduce"

    def bus_ratio(self, ranks: int) -> float:
        """Returns the bus bandwidth divided by the algorithm bandwidth, on `ranks` ranks."""
        return {"2(n-1)/n": 2 * (ranks - 1) / ranks, "(n-1)/n": (ranks - 1) / ranks, "1": 1.0, "": 0.0}[self.bus_factor]


_ROWS = (
    Collective("all_reduce", "Every rank gets the sum (or another reduction) of all.", "reduce", "2(n-1)/n"),
    Collective("reduce", "One rank gets the sum (or another reduction) of all.", "reduce", "1"),
    Collective(
        "reduce_scatter",
        "Each rank gets its part of the sum; the parts come from lists.",
        "reduce",
        "(n-1)/n",
        {"mpi": "all_reduce, and keep your part"},
        chunks=True,
    ),
    Collective(
        "reduce_scatter_tensor",
        "Each rank gets its part of the sum; the parts are one tensor's.",
        "reduce",
        "(n-1)/n",
        {"mpi": "all_reduce, and keep your part"},
        chunks=True,
    ),
    Collective("broadcast", "Every rank gets one rank's tensor.", "one", "1"),
    Collective("scatter", "One rank gives each rank a tensor.", "one", "(n-1)/n", chunks=True),
    Collective("gather", "One rank gets the tensors of all.", "one", "(n-1)/n", chunks=True),
    Collective("all_gather", "Every rank gets the tensors of all, in a list.", "all", "(n-1)/n", chunks=True),
    Collective(
        "all_gather_into_tensor",
        "Every rank gets the tensors of all, in one tensor.",
        "all",
        "(n-1)/n",
        {"mpi": "all_gather"},
        chunks=True,
    ),
    Collective(
        "all_to_all",
        "Each rank gives each rank a tensor, from a list.",
        "all",
        "(n-1)/n",
        {"gloo": "all_to_all_single"},
        chunks=True,
    ),
    Collective("all_to_all_single", "Each rank gives each rank a part of one tensor.", "all", "(n-1)/n", chunks=True),
    Collective("send_recv", "A rank sends a tensor, another receives it; both wait.", "pair", "1"),
    Collective("isend_irecv", "The same without waiting: wait() does.", "pair", "1"),
    Collective(
        "batch_isend_irecv",
        "Each rank sends to the next and receives from the one before.",
        "pair",
        "1",
        {"mpi": "isend and irecv"},
    ),
    Collective("broadcast_object_list", "Every rank gets one rank's Python objects.", "one", "1", objects=True),
    Collective(
        "scatter_object_list",
        "One rank gives each rank a Python object.",
        "one",
        "(n-1)/n",
        {"nccl": "broadcast_object_list, and keep your object"},
        objects=True,
        chunks=True,
    ),
    Collective("gather_object", "One rank gets a Python object of each.", "one", "(n-1)/n", objects=True, chunks=True),
    Collective(
        "all_gather_object", "Every rank gets a Python object of each.", "all", "(n-1)/n", objects=True, chunks=True
    ),
    Collective("barrier", "No rank leaves before all have come.", "wait", ""),
    Collective(
        "monitored_barrier",
        "The same; rank 0 names the ranks that do not come in time.",
        "wait",
        "",
        {"nccl": "barrier, or monitored_barrier in a second group: new_group(backend='gloo')", "mpi": "barrier"},
    ),
)
COLLECTIVES: Mapping[str, Collective] = {row.name: row for row in _ROWS}


def find(name: str) -> Collective:
    """Returns a collective by its name. Raises UserError, with the nearest name, where there is none."""
    if name not in COLLECTIVES:
        hint = nearest_name(name, list(COLLECTIVES))
        raise UserError(message("no_such_collective", collective=name, hint=hint))
    return COLLECTIVES[name]


def instead_of(dtype: str, reduction: str) -> str:
    """Returns what to use where a backend lacks a dtype or a reduction of a collective that it has."""
    if dtype == "int16":
        return "int32"
    if dtype.startswith("complex"):
        return "real numbers: complex ones have no such reduction" if reduction else "torch.view_as_real(tensor)"
    if reduction in BITS:
        return "an integer tensor: these are reductions of bits"
    if reduction == "avg":
        return "sum, then divide by the number of ranks"
    return "uint8" if dtype == "bool" else "float32"


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
    """Calls that a backend does not support: each of these dtypes with each of these reductions.

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
