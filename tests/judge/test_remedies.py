"""What would let a question be judged: nothing that was just tried."""

from __future__ import annotations

import pytest

from samestep.judge.against_one_process import not_replayed
from samestep.judge.remedies import REPLAY, with_remedies
from samestep.message import message
from samestep.records.findings import Finding

CLIPPED = Finding("loss weight", "unknown", message("clipped_by_own_code"))


@pytest.mark.parametrize(
    "replay",
    [
        not_replayed(message("draws_for_a_whole_batch", shape="(1,)")),
        Finding("replayed gradient", "right", message("rates_are_of_one_process")),
    ],
)
def test_a_replay_that_was_tried_is_no_remedy(replay: Finding) -> None:
    (before,) = with_remedies([CLIPPED])
    assert before.remedy == REPLAY
    assert with_remedies([before, replay])[0].remedy is None
    assert with_remedies([CLIPPED, replay])[0].remedy is None
