"""A lane leaves no row and no column of a product out, and what one leaves out is in the other."""

from __future__ import annotations

import pytest

from lane_marks import CHECK, FULL, first_of_each, in_turn, shared_out


@pytest.mark.parametrize(("rows", "columns", "of"), [(4, 19, 4), (16, 8, 3), (5, 5, 2), (3, 7, 3)])
def test_every_row_and_column_is_checked(rows: int, columns: int, of: int) -> None:
    checked = [(row, column) for row in range(rows) for column in range(columns) if in_turn(of, row, column) is CHECK]
    assert {row for row, _ in checked} == {*range(rows)}
    assert {column for _, column in checked} == {*range(columns)}
    assert len(checked) <= rows * columns / of + 1


def test_each_value_of_a_name_is_in_one_lane() -> None:
    cases = shared_out(["a", "b", "c"], [*range(8)], of=3)
    assert [case.marks for case in cases] == [(CHECK,), (FULL,)] * 3
    for checked, others in zip(cases[::2], cases[1::2], strict=True):
        assert checked.values[0] == others.values[0]
        assert sorted(checked.values[1] + others.values[1]) == [*range(8)]
    assert {value for case in cases[::2] for value in case.values[1]} == {*range(8)}


@pytest.mark.parametrize(("names", "values"), [(3, 19), (19, 3)])
def test_a_product_with_a_side_shorter_than_the_share_is_refused(names: int, values: int) -> None:
    with pytest.raises(AssertionError, match="but make full"):
        shared_out([*map(str, range(names))], range(values), of=4)


def test_the_first_of_each_key() -> None:
    cases = [("ddp", "rows"), ("ddp", "rows"), ("fsdp", "rows"), ("fsdp", "rate"), ("ddp", "rate")]
    assert first_of_each(cases, lambda case: case[0], lambda case: case[1]) == [cases[0], cases[2], cases[3]]
