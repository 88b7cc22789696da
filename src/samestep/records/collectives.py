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

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and for send/recv, gather and scatter
    the function GetBw of src/sendrecv.cu, src/gather.cu and src/scatter.cu there.
    """

    name: str
    """The name of the function in torch.distributed."""

    does: str
    """What the collective does, in a sentence."""

    kind: Kind
    """The group in which the collective is listed: a key of KINDS."""

    bus_factor: Factor
    """The bus bandwidth divided by the algorithm bandwidth, for n ranks, as nccl-tests defines it. '': nothing is
    measured in bytes."""

    instead: Mapping[str, str] = field(default_factory=dict)
    """Backend -> what to use where the backend does not have the collective."""

    objects: bool = False
    """Whether the collective takes Python objects."""

    chunks: bool = False
    """Whether the size that counts is that of n parts, one for each rank, as nccl-tests counts it."""

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
    """What each rank of `samestep collectives` does."""

    out: str
    """The folder for the ranks' files."""

    started_at: float
    """When the command started: Unix time, in seconds."""

    collectives: tuple[str, ...]
    """The names of the collectives."""

    backend: str
    """The backend of torch.distributed."""

    dtypes: tuple[str, ...]
    """The dtypes that are checked. The first one is measured."""

    reductions: tuple[str, ...]
    """The reductions that are checked, of REDUCTIONS. The first one is measured."""

    sizes: tuple[int, ...] = ()
    """The sizes of the messages that are measured, in bytes. Empty: only values are checked."""

    seconds: float = 0.25
    """How many seconds each measurement takes, roughly."""

    groups: bool = True
    """Whether sub-groups and device meshes are tried too."""

    elements: int = 3
    """The number of elements of each part, where values are checked."""


@dataclass(frozen=True)
class Case:
    """One call whose values are checked."""

    collective: str
    """The name of the collective."""

    dtype: str
    """The dtype of the tensors. '': the collective has none."""

    reduction: str
    """The reduction. '': the collective has none."""

    group: str
    """The process group: 'world', 'sub-group' or 'mesh NAME'."""

    members: tuple[int, ...]
    """The ranks of the group, in its order."""

    root: int
    """The rank of `members` that gives or gets."""


@dataclass(frozen=True)
class RankValues:
    """The tensors of one rank before and after a call."""

    rank: int
    """The number of the rank."""

    case: Case
    """The call."""

    before: Tensors
    """The tensors that the rank gave: the elements of each."""

    after: Tensors
    """The tensors that the rank got: the elements of each."""

    before_text: str = ""
    """The tensors that the rank gave, as Python shows them."""

    after_text: str = ""
    """The tensors that the rank got, as Python shows them."""

    error: str = ""
    """What the call raised. '': nothing."""

    called: bool = True
    """False for a rank that has no part in the call, such as an odd one without a pair."""


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
    """A line of the fit: seconds = latency + per_byte * bytes, for messages of first_size to last_size bytes."""

    first_size: int
    """The smallest message, in bytes."""

    last_size: int
    """The largest message, in bytes."""

    latency: float
    """The seconds of a message without bytes."""

    per_byte: float
    """The seconds that each byte adds."""

    error: float
    """The greatest relative distance of the measured medians from the line."""


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
    """A call that gave a wrong value."""

    collective: str
    """The name of the collective."""

    dtype: str
    """The dtype of the tensors. '': the collective has none."""

    reduction: str
    """The reduction. '': the collective has none."""

    group: str
    """The process group, as in Case."""

    rank: int
    """The rank that got the wrong value."""

    expected: str
    """What the rank should have got, as text."""

    found: str
    """What the rank got, as text."""


@dataclass(frozen=True)
class Unsupported:
    """Calls that a backend does not support: each of these dtypes with each of these reductions."""

    collectives: tuple[str, ...]
    """The names of the collectives."""

    dtypes: tuple[str, ...]
    """The dtypes. Empty: the collectives have none."""

    reductions: tuple[str, ...]
    """The reductions. Empty: the collectives have none."""

    why: str
    """The first line of the backend's first error."""

    instead: str
    """What to use instead."""


@dataclass(frozen=True)
class CollectiveResults:
    """The results of `samestep collectives`."""

    samestep: str
    """The version of samestep."""

    command: str
    """The command as typed."""

    started: str
    """When the command started: local time, as ISO 8601."""

    backend: str
    """The backend of torch.distributed."""

    device: str
    """The device of the first rank."""

    launcher: str
    """The name of the launcher."""

    world_size: int
    """The number of ranks."""

    machines: int
    """The number of machines."""

    machine: MachineFacts
    """The machine of the first rank."""

    checked: int
    """How many calls had the right values on every rank."""

    wrong: list[WrongValue]
    """The calls that gave a wrong value."""

    unsupported: list[Unsupported]
    """The calls that the backend does not support."""

    curves: list[CollectiveCurve]
    """The measurement of each collective."""

    unmeasured: dict[str, str] = field(default_factory=dict)
    """Collective -> why it has no curve."""

    failed: list[str] = field(default_factory=list)
    """The collectives of `unmeasured` whose values were right."""

    def curve(self, collective: str) -> CollectiveCurve | None:
        """Returns the measurement of a collective; None where it has none."""
        return next((curve for curve in self.curves if curve.collective == collective), None)
