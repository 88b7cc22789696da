"""What ranks that hold the same piece tell of their replicas."""

from __future__ import annotations

from said import says
from samestep.judge.findings import differs
from samestep.judge.same_pieces import _along_data
from samestep.message import message


def test_ranks_of_a_slice_are_named_by_their_numbers_among_all() -> None:
    cause = message("mean_of_means_over_ranks", rank=1, other=0, ratio=1.5)
    finding = _along_data(
        differs("loss weight", "weight of a target", cause, step=0, rank=1, expected=1.0, found=1.5), [1, 3]
    )
    says(finding.message, "mean_of_means_over_ranks", rank=3, other=1, ratio=1.5)
    assert finding.divergence is not None and finding.divergence.rank == 3
    cause = message("losses_weigh_nothing_on_some_ranks", ranks=[1])
    finding = _along_data(differs("loss weight", "weight", cause, step=0, expected=1.0, found=0.0), [1, 3])
    says(finding.message, "losses_weigh_nothing_on_some_ranks", ranks=[3])
