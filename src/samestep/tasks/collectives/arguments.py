"""Builds the arguments of a call by their names, and reads what they hold. See calls.py for the names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from samestep.records.collectives import COLLECTIVES, Case, Tensors
from samestep.tasks.collectives.calls import CALLS

# The tensors that hold a part for each rank; the others of a call hold one part.
WHOLE = {
    "reduce_scatter_tensor": ("tensor",),
    "all_gather_into_tensor": ("out",),
    "all_to_all_single": ("tensor", "out"),
}
GIVEN = ("tensors", "tensor", "objects", "obj")
FILLED = ("outs", "out", "object_outs")
ONLY_ROOT = {"scatter": "tensors", "gather": "outs", "scatter_object_list": "objects", "gather_object": "object_outs"}
UNTOUCHED = 77  # what a tensor holds that is to be filled
WIDE = ("float64", "float32", "int64", "int32", "complex64", "complex128")  # sums of many ranks fit
BROADCAST_OBJECTS = 2  # in the list that broadcast_object_list sends

Fill = Callable[[int], float]  # index -> element


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call: name -> value. given, filled: the names of what holds the values before and after."""

    call: Callable[..., None]
    values: Mapping[str, object]
    given: str
    filled: str

    def __call__(self) -> None:
        self.call(**self.values)

    def before(self) -> object:
        return self.values.get(self.given)

    def after(self) -> object:
        return self.values.get(self.filled)


def build(
    case: Case, rank: int, elements: int, device: str, group: ProcessGroup, *, zeros: bool = False
) -> Arguments | None:
    """Returns the arguments of a rank's call; None for a rank that has no part in it.

    elements: of each part. zeros: every tensor is of zeros, which stay what they are however often they are summed, and
    every Python object is `elements` bytes.
    """
    call, members = CALLS[case.collective], case.members
    names, position, n = [*inspect.signature(call).parameters], members.index(rank), len(members)
    peer = position + 1 if position % 2 == 0 else position - 1
    if ("peer" in names and peer >= n) or ("following" in names and n == 1):
        return None

    def tensor(size: int, fill: Fill) -> Tensor:
        if zeros:
            return torch.empty(size, dtype=getattr(torch, case.dtype), device=device).zero_()
        return _tensor([fill(i) for i in range(size)], case.dtype, device)

    def given(index: int) -> float:
        return element(case, rank, index)

    def untouched(_: int) -> float:
        return UNTOUCHED

    payload = bytes(elements) if zeros else None
    wide = {name: n * elements for name in WHOLE.get(case.collective, ())}
    makers: Mapping[str, Callable[[], object]] = {
        "tensor": lambda: tensor(wide.get("tensor", elements), given),
        "tensors": lambda: [tensor(elements, lambda i, p=p: given(p * elements + i)) for p in range(n)],  # type: ignore[misc]
        "out": lambda: tensor(wide.get("out", elements), untouched),
        "outs": lambda: [tensor(elements, untouched) for _ in range(n)],
        "obj": lambda: _object(rank, 0, payload),
        "objects": lambda: _objects(case, rank, payload),
        "object_outs": lambda: [None] * (1 if case.collective == "scatter_object_list" else n),
        "op": lambda: getattr(dist.ReduceOp, case.reduction.upper()),
        "root": lambda: case.root,
        "peer": lambda: members[peer],
        "is_sender": lambda: position % 2 == 0,
        "following": lambda: members[(position + 1) % n],
        "previous": lambda: members[position - 1],
        "group": lambda: group,
    }
    absent = ONLY_ROOT.get(case.collective) if rank != case.root else None
    values = {name: None if name == absent else makers[name]() for name in names}
    given_name = next((name for name in GIVEN if name in names), "")
    return Arguments(call, values, given_name, next((name for name in FILLED if name in names), given_name))


def _tensor(values: Sequence[float], dtype: str, device: str) -> Tensor:
    kind = getattr(torch, dtype)
    if kind.is_complex:
        return torch.tensor([complex(value, value + 1) for value in values], dtype=kind, device=device)
    return torch.tensor(values, dtype=torch.float64).to(kind).to(device)


def _object(rank: int, part: int, payload: bytes | None) -> object:
    return payload if payload is not None else {f"r{rank}": part}


def _objects(case: Case, rank: int, payload: bytes | None) -> list[object]:
    """The list of broadcast_object_list, which is overwritten on all ranks but the root, or of scatter_object_list."""
    broadcast = case.collective == "broadcast_object_list"
    count = (1 if payload is not None else BROADCAST_OBJECTS) if broadcast else len(case.members)
    if broadcast and rank != case.root:
        return [None] * count
    return [_object(rank, part, payload) for part in range(count)]


def element(case: Case, rank: int, index: int) -> float:
    """Returns element `index` of what a rank gives: small whole numbers that every dtype holds exactly, chosen so that
    a wrong rank, part, order or reduction gives another result."""
    position, n = case.members.index(rank), len(case.members)
    if case.dtype == "bool":
        return (position + index) % 2 if case.reduction else (rank >> (index % 8)) & 1
    match case.reduction:
        case "avg":
            return (position + index) % 3 * n
        case "product":
            return 1 + (position == index % n) + 2 * (position == (index + 1) % n)
        case "min" | "max":
            return (7 * position + 3 * index) % 11
        case "band":
            return 127 ^ (1 << (position + index) % 7)
        case "bor" | "bxor":
            return 1 << (position + index) % 7
        case "sum" if case.dtype not in WIDE:
            return (position + index) % 3
    return 10 * rank + index if case.dtype in WIDE else (10 * rank + index) % 121


def numbers(value: Any) -> Tensors:
    """Returns what an argument holds as numbers: of each tensor or object a list."""
    if value is None:
        return []
    if isinstance(value, list):
        return [inner for nested in value for inner in (numbers(nested) or [[]])]
    if isinstance(value, Tensor):
        plain = torch.view_as_real(value) if value.is_complex() else value
        return [plain.detach().cpu().to(torch.float64).flatten().tolist()]
    ((name, part),) = value.items()  # an object: see _object
    return [[float(name[1:]), float(part)]]


def text(value: Any) -> str:
    """Returns what an argument holds as Python shows it, a tensor as the list of its elements."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def source(collective: str) -> str:
    """Returns the lines of a call, without the function's head."""
    lines = inspect.getsource(CALLS[collective]).splitlines()[1:]
    return "\n".join(line.removeprefix("    ").partition("  # type: ")[0] for line in lines)


def has_values(collective: str) -> bool:
    """Whether a call moves values; a barrier moves none."""
    return COLLECTIVES[collective].kind != "wait"
