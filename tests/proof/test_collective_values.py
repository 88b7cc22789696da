"""The judge of collectives' values, on calls that are made up: what is right, wrong, and what the backend lacks."""

from __future__ import annotations

import pytest

from samestep.proof.collective_values import judge_values
from samestep.records.collectives import Case, CollectiveRank, RankValues, Tensors

BEFORE = [[[1.0, 2.0]], [[3.0, 4.0]]]


def case(collective: str, reduction: str = "", dtype: str = "float32", root: int = 0) -> Case:
    return Case(collective, dtype, reduction, "world", (0, 1), root)


def ranks(*cases: tuple[Case, list[Tensors], list[str]]) -> list[CollectiveRank]:
    """Two ranks. For each call: what they held after it, and the errors that they raised."""
    return [
        CollectiveRank(
            [RankValues(rank, of, BEFORE[rank], after[rank], error=errors[rank]) for of, after, errors in cases]
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (case("all_reduce", "sum"), [[[4.0, 6.0]]] * 2),
        (case("all_reduce", "product"), [[[3.0, 8.0]]] * 2),
        (case("all_reduce", "max"), [[[3.0, 4.0]]] * 2),
        (case("all_reduce", "bxor", "int64"), [[[2.0, 6.0]]] * 2),
        (case("all_reduce", "sum", "bool"), [[[1.0, 1.0]]] * 2),
        (case("all_reduce", "product", "complex64"), [[[-5.0, 10.0]]] * 2),  # (1 + 2i) (3 + 4i)
        (case("all_reduce", "avg", "complex64"), [[[2.0, 3.0]]] * 2),
        (case("reduce_scatter_tensor", "sum"), [[[4.0]], [[6.0]]]),
        (case("broadcast", root=1), [[[3.0, 4.0]]] * 2),
        (case("all_gather_into_tensor"), [[[1.0, 2.0, 3.0, 4.0]]] * 2),
        (case("all_to_all_single"), [[[1.0, 3.0]], [[2.0, 4.0]]]),
        (case("send_recv"), [[[1.0, 2.0]], [[1.0, 2.0]]]),
        (case("batch_isend_irecv"), [[[3.0, 4.0]], [[1.0, 2.0]]]),
    ],
    ids=lambda value: f"{value.collective} {value.reduction} {value.dtype}" if isinstance(value, Case) else "",
)
def test_a_call_is_right_only_with_the_right_values(of: Case, expected: list[Tensors]) -> None:
    assert judge_values(ranks((of, expected, ["", ""])), "gloo") == (1, [], [])
    off = [[[*expected[1][0][:-1], expected[1][0][-1] + 1.0]]]
    right, wrong, unsupported = judge_values(ranks((of, [expected[0], *off], ["", ""])), "gloo")
    assert (right, unsupported) == (0, []) and [(each.collective, each.rank) for each in wrong] == [(of.collective, 1)]
    (each,) = wrong
    assert each.expected != each.found


@pytest.mark.parametrize(("dtype", "off", "right"), [("float32", 2e-7, 1), ("float32", 1e-5, 0), ("bfloat16", 1e-3, 1)])
def test_an_average_may_be_rounded_and_no_sum(dtype: str, off: float, right: int) -> None:
    mean: list[Tensors] = [[[2.0 * (1 + off), 3.0]]] * 2
    assert judge_values(ranks((case("all_reduce", "avg", dtype), mean, ["", ""])), "gloo")[0] == right
    total: list[Tensors] = [[[4.0 * (1 + off), 6.0]]] * 2
    assert judge_values(ranks((case("all_reduce", "sum", dtype), total, ["", ""])), "gloo")[0] == 0


def test_what_all_ranks_refuse_is_lacking_and_what_one_refuses_is_wrong() -> None:
    of, sums = case("all_reduce", "sum"), [[[4.0, 6.0]]] * 2
    right, wrong, unsupported = judge_values(ranks((of, sums, ["no", "no"])), "gloo")
    assert (right, wrong) == (0, []) and [each.why for each in unsupported] == ["no"] and unsupported[0].instead
    right, wrong, unsupported = judge_values(ranks((of, sums, ["", "no"])), "gloo")
    assert (right, unsupported) == (0, []) and [(each.rank, each.found) for each in wrong] == [(1, "no")]


def test_only_the_root_holds_what_is_reduced() -> None:
    of = case("reduce", "sum", root=1)
    assert judge_values(ranks((of, [[[9.0, 9.0]], [[4.0, 6.0]]], ["", ""])), "gloo")[0] == 1
    assert judge_values(ranks((of, [[[4.0, 6.0]], [[9.0, 9.0]]], ["", ""])), "gloo")[0] == 0


FOUR = [[[float(10 * rank + part)] for part in range(4)] for rank in range(4)]  # a tensor for each rank
AFTER_FOUR: list[tuple[str, list[Tensors]]] = [
    ("send_recv", [FOUR[0], FOUR[0], FOUR[2], FOUR[2]]),
    ("isend_irecv", [FOUR[0], FOUR[0], FOUR[2], FOUR[2]]),
    ("batch_isend_irecv", [FOUR[3], FOUR[0], FOUR[1], FOUR[2]]),
    ("broadcast", [FOUR[2]] * 4),
    ("scatter", [[[20.0]], [[21.0]], [[22.0]], [[23.0]]]),
    ("gather", [[], [], [[0.0], [10.0], [20.0], [30.0]], []]),
    ("all_to_all", [[[float(10 * giver + place)] for giver in range(4)] for place in range(4)]),
]


@pytest.mark.parametrize(("name", "after"), AFTER_FOUR, ids=[name for name, _ in AFTER_FOUR])
def test_four_ranks_tell_the_next_from_the_one_before_and_the_root_from_the_rest(
    name: str, after: list[Tensors]
) -> None:
    """The ranks of a sub-group: their numbers are not their places in it."""
    members = (1, 3, 4, 6)
    of = Case(name, "float32", "", "sub-group", members, root=4)

    def wrong_ranks(after: list[Tensors]) -> list[int]:
        held = [CollectiveRank([RankValues(rank, of, FOUR[n], after[n])]) for n, rank in enumerate(members)]
        return [each.rank for each in judge_values(held, "gloo")[1]]

    assert wrong_ranks(after) == []
    for place, rank in enumerate(members):
        off: Tensors = [*after[place], [-1.0]]  # one more tensor, also where there should be none
        assert wrong_ranks([*after[:place], off, *after[place + 1 :]]) == [rank]
