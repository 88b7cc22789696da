"""Computes what each rank must hold after a collective, from what all held before, and judges what they hold."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from samestep.records.collectives import (
    COLLECTIVES,
    FLOATING,
    Case,
    CollectiveRank,
    RankValues,
    Tensors,
    Unsupported,
    WrongValue,
    instead_of,
)

List = list[float]
Given = Sequence[Tensors]  # what each member of the group gave, in the group's order
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def judge_values(ranks: Sequence[CollectiveRank], backend: str) -> tuple[int, list[WrongValue], list[Unsupported]]:
    """Returns how many calls had the right values on all ranks, the wrong ones, and what the backend lacks.

    ranks: of the whole world. A call that every rank refuses is unsupported; one that only some refuse is wrong.
    """
    calls: dict[Case, list[RankValues]] = {}
    for held in (held for rank in ranks for held in rank.held):
        calls.setdefault(held.case, []).append(held)
    right, wrong, refused = 0, [], []
    for case, holders in calls.items():
        of_call = [held for held in holders if held.called]
        if not of_call:  # a group of one rank has nobody to send to
            continue
        if all(held.error for held in of_call):
            refused.append((case, of_call[0].error))
            continue
        wrong_values = list(_wrong(case, {held.rank: held for held in holders}))
        wrong += wrong_values
        right += not wrong_values
    return right, wrong, _unsupported(refused, Counter(case.collective for case in calls), backend)


def _wrong(case: Case, holders: Mapping[int, RankValues]) -> list[WrongValue]:
    given = [holders[rank].before for rank in case.members]
    wrong = []
    for place, rank in enumerate(case.members):
        held = holders[rank]
        if not held.called:
            continue
        expected = EXPECTED[case.collective](case, given, place)
        if held.error:
            wrong.append(_wrong_value(case, rank, "a value", held.error))
        elif expected is not None and not _same(case, expected, held.after):
            wrong.append(_wrong_value(case, rank, _shown(expected), _shown(held.after)))
    return wrong


def _wrong_value(case: Case, rank: int, expected: str, found: str) -> WrongValue:
    return WrongValue(
        case.collective,
        case.dtype,
        case.reduction,
        group=case.group,
        rank=rank,
        expected=expected,
        found=found,
    )


def _same(case: Case, expected: Tensors, received: Tensors) -> bool:
    """Returns whether two values are equal; an average may be rounded, as the sum of halves is not that of wholes."""
    if case.reduction != "avg" or case.dtype not in FLOATING:
        return expected == received
    slack = 4 * EPSILON.get(case.dtype, EPSILON["float32"])
    return list(map(len, expected)) == list(map(len, received)) and all(
        math.isclose(want, got, rel_tol=slack) for pair in zip(expected, received) for want, got in zip(*pair)
    )


def _shown(tensors: Tensors) -> str:
    return str([[int(x) if float(x).is_integer() else x for x in tensor] for tensor in tensors])


def _unsupported(refused: Sequence[tuple[Case, str]], tried: Counter[str], backend: str) -> list[Unsupported]:
    """Groups the refused calls: by what to use instead, then by dtypes, reductions and collectives.

    tried: how many calls there were of each collective.
    """
    lacking = {name for name, count in Counter(case.collective for case, _ in refused).items() if count == tried[name]}
    dtypes: dict[tuple[str, str, str], list[str]] = {}  # (advice, collective, reduction) -> the dtypes
    why: dict[str, str] = {}
    for case, error in refused:
        advice = COLLECTIVES[case.collective].instead.get(backend) if case.collective in lacking else None
        advice = advice or instead_of(case.dtype, case.reduction)
        why.setdefault(advice, error)
        known = dtypes.setdefault((advice, case.collective, case.reduction), [])
        known += [case.dtype] if case.dtype and case.dtype not in known else []
    reductions: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (advice, name, reduction), held_dtypes in dtypes.items():
        reductions.setdefault((advice, name, tuple(held_dtypes)), []).append(reduction)
    names: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (advice, name, kinds), of_kinds in reductions.items():
        names.setdefault((advice, kinds, tuple(filter(None, of_kinds))), []).append(name)
    return [Unsupported(tuple(members), *key[1:], why[key[0]], key[0]) for key, members in names.items()]


_OF_WHOLES: Mapping[str, Callable[[int, int], int]] = {
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
_OF_NUMBERS: Mapping[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
}


def _reduced(case: Case, tensors: Sequence[List]) -> Tensors:
    """Reduces tensors of one size, element by element. Of bools a sum is `or`, and a product `and`."""
    if case.dtype.startswith("complex"):
        return [_reduced_complex(case, tensors)]
    if case.reduction in _OF_WHOLES:
        operation = _OF_WHOLES[case.reduction]
        return [[float(reduce(operation, map(int, column))) for column in zip(*tensors)]]
    number = _OF_NUMBERS[case.reduction]
    sums = [reduce(number, column) for column in zip(*tensors)]
    if case.dtype == "bool":
        return [[float(bool(total)) for total in sums]]
    return [[total / len(tensors) for total in sums] if case.reduction == "avg" else sums]


def _reduced_complex(case: Case, tensors: Sequence[List]) -> List:
    columns = zip(*([complex(*tensor[i : i + 2]) for i in range(0, len(tensor), 2)] for tensor in tensors))
    sums = [math.prod(column) if case.reduction == "product" else sum(column) for column in columns]
    shared = [total / len(tensors) for total in sums] if case.reduction == "avg" else sums
    return [part for number in shared for part in (number.real, number.imag)]


def _parts(tensor: List, count: int) -> list[List]:
    size = len(tensor) // count
    return [tensor[i * size : (i + 1) * size] for i in range(count)]


def _first(given: Given) -> list[List]:
    return [tensors[0] for tensors in given]


def _root(case: Case) -> int:
    return case.members.index(case.root)


def _at_root(case: Case, place: int, value: Tensors) -> Tensors | None:
    return value if place == _root(case) else None


def _column(given: Given, place: int) -> list[List]:
    """Returns what each rank gives to the rank at `place`, from its list."""
    return [tensors[place] for tensors in given]


def _split_column(given: Given, place: int) -> list[List]:
    """Returns what each rank gives to the rank at `place`, from one tensor."""
    return [_parts(tensors[0], len(given))[place] for tensors in given]


def _joined(tensors: Sequence[List]) -> Tensors:
    return [[element for tensor in tensors for element in tensor]]


def _pairwise(case: Case, given: Given, place: int) -> Tensors:
    return given[place - 1] if place % 2 else given[place]


Expected = Callable[[Case, Given, int], Tensors | None]
# collective -> what the member at a place must hold, from what all gave; None: torch promises nothing.
EXPECTED: Mapping[str, Expected] = {
    "all_reduce": lambda case, given, place: _reduced(case, _first(given)),
    "reduce": lambda case, given, place: _at_root(case, place, _reduced(case, _first(given))),
    "reduce_scatter": lambda case, given, place: _reduced(case, _column(given, place)),
    "reduce_scatter_tensor": lambda case, given, place: _reduced(case, _split_column(given, place)),
    "broadcast": lambda case, given, place: given[_root(case)],
    "scatter": lambda case, given, place: [given[_root(case)][place]],
    "gather": lambda case, given, place: _first(given) if place == _root(case) else [],
    "all_gather": lambda case, given, place: _first(given),
    "all_gather_into_tensor": lambda case, given, place: _joined(_first(given)),
    "all_to_all": lambda case, given, place: _column(given, place),
    "all_to_all_single": lambda case, given, place: _joined(_split_column(given, place)),
    "send_recv": _pairwise,
    "isend_irecv": _pairwise,
    "batch_isend_irecv": lambda case, given, place: given[place - 1],
    "broadcast_object_list": lambda case, given, place: given[_root(case)],
    "scatter_object_list": lambda case, given, place: [given[_root(case)][place]],
    "gather_object": lambda case, given, place: _first(given) if place == _root(case) else [],
    "all_gather_object": lambda case, given, place: _first(given),
    "barrier": lambda case, given, place: [[float(len(given))]],
    "monitored_barrier": lambda case, given, place: [[float(len(given))]],
}
