"""Jobs that are no plain mean over the rows of one tensor: proven where they can be, and told about where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import Ranks, RanksFailed, prove

ODD = f"{Path(__file__).parent}/jobs_odd.py"

SAME = {
    "time_first": None,
    "side_table": None,
    "reads_indices": None,
    "class_weights": "evaluation's loss depend on",
    "order_matters": "evaluation's loss depend on",
    "autocast": None,
    "large_targets": "the loss explodes at 0.05",
    "random_in_evaluation": "or on random numbers",
    "buffer_that_is_not_saved": None,
    "buffer_that_moves_between_micro_batches": None,
    "class_weights_that_are_given": None,
    "two_kinds_of_datasets": None,
}


@pytest.mark.parametrize("name", SAME)
def test_same(name: str, ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    verdict = prove(judge_rank, ranks(2), f"{ODD}:{name}", "ddp")
    assert verdict.verdict == "same", verdict
    assert verdict.bitwise
    said = SAME[name]
    assert any(said in note for note in verdict.notes) if said else verdict.notes == []


def test_what_amplifies_rounding_is_refused(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    verdict = prove(judge_rank, ranks(2), f"{ODD}:chaos", "ddp")
    assert verdict.verdict == "refused", verdict
    assert "ill-conditioned" in str(verdict.reason)


def test_what_does_not_repeat_itself_is_refused(ranks: Callable[[int], Ranks], judge_rank: Ranks) -> None:
    with pytest.raises(RanksFailed, match="the job does not repeat itself"):
        prove(judge_rank, ranks(2), f"{ODD}:random_numbers_of_python", "ddp")
