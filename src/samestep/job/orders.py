"""The orders of an epoch's rows that Job.order takes, besides a function of the job's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import UserError


@dataclass(frozen=True, eq=False)
class Weighted:
    """An epoch's order: rows drawn with replacement, by their weights, as torch's WeightedRandomSampler draws them.

    weights: of every sample, 0 or above. num_samples: rows of an epoch; None: as many as the dataset has.
    """

    weights: Sequence[float]
    num_samples: int | None = None

    def check(self, samples: int) -> None:
        _check_one_each("Weighted", "weights", self.weights, samples)
        if self.num_samples is not None and self.num_samples < 1:
            raise UserError(f"Weighted(num_samples={self.num_samples}): an epoch has 1 row or more")
        weights = self.weights.tolist() if hasattr(self.weights, "tolist") else self.weights
        if not min(weights) >= 0 or not 0 < sum(weights) < float("inf"):
            raise UserError("Weighted: the weights must be 0 or above, and some of them above 0")


@dataclass(frozen=True, eq=False)
class ByLength:
    """An epoch's order: batches of rows of like lengths, so that little is padded; every row once.

    lengths: of every sample. buckets: into so many parts of equal size the rows are sorted by length; within one they
    are shuffled, and so are the batches. The incomplete last batch has rows of any length.
    """

    lengths: Sequence[float]
    buckets: int = 10

    def check(self, samples: int) -> None:
        _check_one_each("ByLength", "lengths", self.lengths, samples)
        if self.buckets < 1:
            raise UserError(f"ByLength(buckets={self.buckets}): give 1 bucket or more")


@dataclass(frozen=True)
class Lanes:
    """An epoch's order: global_batch contiguous lanes, as the language models' `batchify` cuts a text.

    Row b of step s is sample b * S + s, where S = samples // global_batch: each row continues the one at its place in
    the step before, so that a state can be carried on (Job.carry_state). The same in every epoch. The incomplete last
    batch has the samples that are left over.
    """


def _check_one_each(what: str, field: str, values: Sequence[float], samples: int) -> None:
    if len(values) != samples:
        raise UserError(f"{what} has {len(values)} {field}, and the dataset {samples} samples; give one for each")
