"""What ranks that step apart bring together, on made-up weights. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.judge.meetings import Meeting
from samestep.judge.steps_apart import StepsApart
from samestep.records.record import Record

RANKS, SIZE, CLOSE = 3, 300, 1e-6
DRAWN = np.random.default_rng(0)
START = {name: DRAWN.normal(size=SIZE) for name in ("a", "b")}
WAYS = [{name: 0.03 * DRAWN.normal(size=SIZE) for name in START} for _ in range(RANKS)]
OWN = [{name: START[name] + way[name] for name in START} for way in WAYS]
MEAN = {name: np.mean([own[name] for own in OWN], axis=0) for name in START}
EVEN, RING = np.full((RANKS, RANKS), 1 / RANKS), np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])


def met(new: Any, gradients: Any = (), steps: Any = (3,) * RANKS, start: Any = (START,) * RANKS) -> Meeting:
    """A meeting of the ranks at which they begin with new weights."""
    return Meeting([*steps], [*start], OWN, [*new], [*gradients], [], CLOSE)


def weighed(weights: Any, base: float = 0.0) -> list[dict[str, Any]]:
    """The weights of ranks of which each takes a sum of all. weights: shape [rank, rank that is taken]."""
    return [
        {name: base * START[name] + sum(w * own[name] for w, own in zip(row, OWN)) for name in START} for row in weights
    ]


def along(factor: float, way: Any = MEAN) -> list[dict[str, Any]]:
    """All ranks at the start, and so much of the way from there."""
    return [{name: START[name] + factor * (way[name] - START[name]) for name in START}] * RANKS


def judged(*meetings: Meeting, rows: Any = (8,) * RANKS) -> Any:
    """The answer about meetings of ranks that have trained on so many rows in each of 3 steps."""
    ranks = []
    for count in rows:
        step = SimpleNamespace(settings=[], begun={}, micro_batches=[SimpleNamespace(rows=["row"] * count)])
        ranks.append(SimpleNamespace(steps=[step] * 8, buffers={}))
    ranks_of: Any = ranks
    return StepsApart(ranks_of, Record(Path()), meetings).weights()


@pytest.mark.parametrize(
    ("meeting", "answer", "said"),
    [
        (met(weighed(EVEN)), "right", "weights_are_the_mean"),
        (met(along(0.7)), "right", "weights_go_towards_the_mean"),
        (met(along(-0.7)), "differs", "outer_step_goes_backwards"),
        (met(weighed(np.ones((RANKS, RANKS)))), "differs", "weights_added_up_over_ranks"),
        (met(along(RANKS)), "differs", "weights_added_up_over_ranks"),
        (met([OWN[0]] * RANKS), "differs", "weights_of_some_ranks_alone"),
        (met([MEAN, MEAN, OWN[2]]), "differs", "average_not_loaded_by_some_ranks"),
        (met([own | {"a": MEAN["a"]} for own in OWN]), "differs", "parameters_left_out_of_averaging"),
        (met(weighed(EVEN), steps=(3, 3, 4)), "differs", "ranks_meet_at_different_steps"),
        (met(weighed(RING)), "right", "weights_are_mixed"),
        (met(weighed(2 * RING)), "differs", "weights_added_up_over_ranks"),
        (met(weighed([[0.5, 0.25, 0.25]] * RANKS)), "unknown", "ranks_weigh_unequally_in_the_weights"),
        (met([{name: DRAWN.normal(size=SIZE) for name in START}] * RANKS), "unknown", "meeting_not_explained"),
    ],
)
def test_weights_are_judged_by_what_they_hold_of_the_ranks(meeting: Meeting, answer: str, said: str) -> None:
    finding = judged(meeting)
    assert (finding.answer, finding.message.fields["how"].id if answer == "right" else finding.message.id) == (
        answer,
        said,
    )


@pytest.mark.parametrize(
    ("factor", "answer", "said"),
    [
        (1.0, "right", "weights_meet"),
        (-1.0, "differs", "outer_step_goes_backwards"),
        (RANKS, "differs", "weights_added_up_over_ranks"),
    ],
)
def test_an_outer_gradient_is_the_mean_way(factor: float, answer: str, said: str) -> None:
    gradients = [{name: factor * (START[name] - MEAN[name]) for name in START}] * RANKS
    finding = judged(met(along(1.3), gradients))
    assert (finding.answer, finding.message.id) == (answer, said)


def test_an_outer_gradient_of_each_rank_alone_is_no_mean() -> None:
    gradients = [{name: START[name] - own[name] for name in START} for own in OWN]
    meeting = met(along(1.3), gradients)
    assert judged(meeting).message.id == "weights_of_some_ranks_alone"


def test_ranks_may_weigh_by_their_rows_and_an_outer_step_may_have_momentum() -> None:
    by_rows = met(weighed([[0.5, 0.25, 0.25]] * RANKS))
    assert judged(by_rows, rows=(16, 8, 8)).message.fields["how"].id == "weights_are_the_mean_by_rows"
    turned = {name: START[name] + 0.1 * np.roll(WAYS[0][name], 7) for name in START}
    way = {name: np.mean([turned[name], *(own[name] for own in OWN[1:])], axis=0) for name in START}
    first = Meeting([3] * RANKS, [START] * RANKS, [turned, *OWN[1:]], [way] * RANKS, [], [], CLOSE)
    pushed = [{name: along(0.8)[0][name] + 0.4 * (way[name] - START[name]) for name in START}] * RANKS
    assert judged(first, met(pushed)).answer == "right"
    assert judged(met(pushed)).message.id == "meeting_not_explained"


def test_ranks_that_write_weights_of_their_own_do_not_meet() -> None:
    assert not met([{name: own[name].clip(-1, 1) for name in own} for own in OWN]).joins()
    assert met(weighed(RING)).joins() and met(weighed(EVEN)).joins()
