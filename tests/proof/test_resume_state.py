"""The state at an interruption and the one after loading, as sums over pieces: what is compared, and what is not."""

from __future__ import annotations

import math

import pytest

from samestep.proof.resume import _differing, state_cause
from samestep.records.training_record import TensorRecord

VALUES = [1.5, -2.0, 0.25, 4.0, -0.5, 3.0]
State = dict[str, TensorRecord]


def piece(first: int, last: int, values: list[float] = VALUES) -> TensorRecord:
    here = range(first, last)
    mixed = sum(values[at] * math.cos(at) for at in here)
    return TensorRecord(len(here), len(values), sum(abs(values[at]) for at in here), mixed)


def shards(*ends: int, name: str = "weights of w") -> list[State]:
    return [{name: piece(first, last)} for first, last in zip((0, *ends), ends)]


def differing(before: list[State], after: list[State]) -> list[str]:
    return [name for name, *_ in _differing(before, after, 1e-12)]


@pytest.mark.parametrize("before", [shards(3, 6), shards(6), [*shards(6), *shards(6)], shards(6, 6)])
@pytest.mark.parametrize("after", [shards(2, 4, 6), shards(6), [*shards(6), *shards(6)]])
def test_pieces_are_compared_with_other_pieces(before: list[State], after: list[State]) -> None:
    assert differing(before, after) == []
    changed = VALUES[1:] + VALUES[:1]  # the same magnitudes in other places
    assert differing(before, [{"weights of w": piece(0, 6, changed)}]) == ["weights of w"]
    assert differing([{"weights of w": piece(0, 6, changed)}], after) == ["weights of w"] * len(
        [state for state in after if state["weights of w"].size == 6] or [0]
    )


def test_a_wrong_copy_on_one_rank_is_seen() -> None:
    wrong = {"weights of w": piece(0, 6, [0.0] * 6)}
    found = list(_differing(shards(6), [*shards(6), wrong], 1e-12))
    assert [(name, rank, got) for name, rank, _, got in found] == [("weights of w", 1, 0.0)]


def test_an_optimizers_state_may_be_lost_or_hidden() -> None:
    trained, weights = {"optimizer of w": TensorRecord(0, 0, 0.0, 0.0)}, shards(6)[0]
    before = [{**weights, **trained, "exp_avg of w": piece(0, 6)}]
    assert [each[3] for each in _differing(before, [{**weights, **trained}], 1e-12)] == ["lost"]
    assert differing(before, shards(6)) == []  # an engine with flat copies of the parameters


def test_buffers_are_each_ranks_own_and_on_other_ranks_the_first_ones() -> None:
    mine, theirs = ({"buffer b": piece(0, 6, [value] * 6)} for value in (1.0, 2.0))
    assert differing([mine, theirs], [mine, theirs]) == []
    assert differing([mine, theirs], [mine, mine]) == ["buffer b"]
    assert differing([mine, theirs], [mine, mine, mine]) == []
    assert differing([mine, theirs], [mine, mine, theirs]) == ["buffer b"]


def test_what_another_engine_has_not_is_not_lost() -> None:
    weights = shards(6)[0]
    before = [{**weights, "scaler ['scale']": piece(0, 6)}]
    assert differing(before, [weights]) == []
    assert differing(before, [{**weights, "scaler ['scale']": piece(0, 6, [0.0] * 6)}]) == ["scaler ['scale']"]


def test_a_tied_weight_that_is_loaded_apart_has_a_name() -> None:
    apart = [{**shards(6)[0], "weights of other": piece(0, 6)}]
    ((name, _, want, got),) = _differing(shards(6), apart, 1e-12)
    assert state_cause(name, want, got, changed=False).id == "tied_weight_loaded_apart"


def test_an_evaluation_that_is_counted_twice_is_seen() -> None:
    one = {"evaluations ['curve'][0]['step']": TensorRecord(1, 1, 4.0, 4.0)}
    two = {**one, "evaluations ['curve'][1]['step']": TensorRecord(1, 1, 4.0, 4.0)}
    ((name, rank, want, got),) = _differing([one, {}], [two, {}], 1e-12)
    assert (rank, want, got) == (0, "absent", 4.0)
    assert state_cause(name, want, got, changed=False).id == "evaluation_counted_twice"
