"""Parameters under other names: which of one recording is which of the other. It needs no torch."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.judge.matching import matched

ONE, OTHER, BOTH = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([1.0, 2.0]) * (1 + 1e-6)


def test_what_begins_with_the_same_weights_is_the_same() -> None:
    names = matched({"a": 1, "b": 2}, {"x.a": 1, "x.b": 2}, {}, {})
    assert names == {"x.a": "a", "x.b": "b"}


def test_names_that_were_exchanged_are_told_by_the_weights() -> None:
    assert matched({"a": 1, "b": 2}, {"b": 1, "a": 2}, {}, {}) == {"b": "a", "a": "b"}


@pytest.mark.parametrize("second", [ONE, BOTH], ids=["same bits", "rounding"])
def test_biases_of_zero_are_told_by_their_gradients(second: np.ndarray) -> None:
    names = matched({"a": 0, "b": 0}, {"b": 0, "c": 0}, {"a": ONE, "b": OTHER}, {"b": second, "c": OTHER})
    assert names == {"b": "a", "c": "b"}


def test_what_nothing_tells_apart_keeps_its_name_or_its_place() -> None:
    assert matched({"a": 0, "b": 0}, {"b": 0, "a": 0}, {}, {}) == {"b": "b", "a": "a"}
    assert matched({"a": 0, "b": 0}, {"x": 0, "y": 0}, {}, {}) == {"x": "a", "y": "b"}


def test_other_weights_keep_their_name() -> None:
    assert matched({"a": 1, "b": 2}, {"a": 9, "b": 2}, {}, {}) == {"b": "b", "a": "a"}


def test_other_weights_under_other_names_are_matched_in_turn_where_their_gradients_have_one_size() -> None:
    gradients = {"a": ONE, "b": np.ones(3)}
    assert matched({"a": 1, "b": 2}, {"x": 8, "y": 9}, gradients, {"x": OTHER, "y": np.ones(3)}) == {"x": "a", "y": "b"}
    assert matched({"a": 1, "b": 2}, {"x": 8, "y": 9}, gradients, {"x": OTHER, "y": np.ones(4)}) == {}


def test_a_new_parameter_takes_no_name_that_stands_for_another() -> None:
    assert matched({"a": 1}, {"b": 1, "a": 7}, {}, {}) == {"b": "a", "a": "a (second)"}


def test_a_trained_one_is_matched_with_a_trained_one_first() -> None:
    first = {"a (frozen)": 1, "b": 1}
    assert matched(first, {"x": 1, "y (frozen)": 1}, {}, {}) == {"y (frozen)": "a (frozen)", "x": "b"}
