"""Bandwidths of a collective, and the fit of its times: seconds = latency + per_byte * bytes, in pieces of sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import median

from samestep.records.collectives import COLLECTIVES, CollectiveCurve, CollectiveRank, Piece, Point

MOST_PIECES = 3  # such as small messages, large ones, and those beyond a cache
LEAST_POINTS = 3  # of a piece: two lie on a line always
CLOSE = 0.05  # a fit whose relative errors are of this size is good enough
WORTH = 0.5  # a further piece must leave at most this share of the squared relative errors


def curves(ranks: Sequence[CollectiveRank], dtype: str) -> list[CollectiveCurve]:
    """Returns the measurement of each collective. ranks: of the whole world."""
    names = dict.fromkeys(timed.collective for timed in ranks[0].timed)
    return [_curve(name, ranks, dtype) for name in names]


def _curve(name: str, ranks: Sequence[CollectiveRank], dtype: str) -> CollectiveCurve:
    of_ranks = [[timed for timed in rank.timed if timed.collective == name] for rank in ranks]
    points = [
        _point(
            name, same_size[0].size, [max(call) for call in zip(*(timed.seconds for timed in same_size))], len(ranks)
        )
        for same_size in zip(*of_ranks)
    ]
    facts = COLLECTIVES[name]
    return CollectiveCurve(
        name,
        "" if facts.objects or facts.kind == "wait" else dtype,
        points,
        fit([point.size for point in points], [point.median for point in points]),
    )


def _point(name: str, size: int, seconds: list[float], ranks: int) -> Point:
    ratio = COLLECTIVES[name].bus_ratio(ranks)
    if not ratio:
        return Point(size, seconds)
    algorithm = size / median(seconds)
    return Point(size, seconds, algorithm, algorithm * ratio)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> list[Piece]:
    """Returns the fit in one to three pieces, the fewest that describe the times about as well as more would.

    sizes: in bytes, ascending. It minimises the sum of the squared relative errors, so that small messages count as
    much as large ones; latency and per_byte are never negative.
    """
    n = len(sizes)

    @cache
    def piece(first: int, last: int) -> tuple[float, Piece]:
        return _line(sizes[first:last], seconds[first:last])

    @cache
    def best(last: int, count: int) -> tuple[float, tuple[int, ...]]:
        """The least error of the first `last` points in `count` pieces, and where these end."""
        if count == 1:
            return piece(0, last)[0], (last,)
        candidates: list[tuple[float, tuple[int, ...]]] = [(math.inf, (last,))]
        for middle in range(LEAST_POINTS * (count - 1), last - LEAST_POINTS + 1):
            error, ends = best(middle, count - 1)
            candidates.append((error + piece(middle, last)[0], (*ends, last)))
        return min(candidates)

    chosen = best(n, 1)
    for count in range(2, min(MOST_PIECES, n // LEAST_POINTS) + 1):
        finer = best(n, count)
        if chosen[0] > n * CLOSE**2 and finer[0] < WORTH * chosen[0]:
            chosen = finer
    ends = (0, *chosen[1])
    return [piece(first, last)[1] for first, last in pairwise(ends)]


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, Piece]:
    """The line of least squared relative error: weighted least squares with weights 1 / seconds²."""
    weights = [1 / max(t, 1e-12) ** 2 for t in seconds]
    total = sum(weights)
    mean_size = sum(w * n for w, n in zip(weights, sizes)) / total
    mean_s = sum(w * t for w, t in zip(weights, seconds)) / total
    spread = sum(w * (n - mean_size) ** 2 for w, n in zip(weights, sizes))
    per_byte = 0.0
    if spread:
        per_byte = sum(w * (n - mean_size) * (t - mean_s) for w, n, t in zip(weights, sizes, seconds)) / spread
    if per_byte < 0:
        per_byte = 0.0
    latency = mean_s - per_byte * mean_size
    if latency < 0:  # the best line through the origin
        latency = 0.0
        per_byte = sum(w * n * t for w, n, t in zip(weights, sizes, seconds)) / sum(
            w * n * n for w, n in zip(weights, sizes)
        )
    errors = [(latency + per_byte * n - t) / max(t, 1e-12) for n, t in zip(sizes, seconds)]
    largest = max(map(abs, errors))
    return sum(error**2 for error in errors), Piece(sizes[0], sizes[-1], latency, per_byte, largest)
