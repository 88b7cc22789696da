"""At which bandwidth between ranks one engine is expected to fall behind another, from what each sends a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from samestep.records.results import EngineResult

LEAST = 1.05  # times the other's step: less is no difference between two engines


@dataclass(frozen=True)
class Crossing:
    """Below `bits_per_second`, `first`, the faster one here, is expected to be slower than `second`.

    more_bytes: that a rank of `first` sends a step beyond one of `second`. faster_s: by which its step is shorter here.
    """

    first: EngineResult
    second: EngineResult
    bits_per_second: float
    more_bytes: int
    faster_s: float


def crossings(rows: Sequence[EngineResult]) -> list[Crossing]:
    """Returns the crossings of measured engines of several ranks, the one of the fastest link first.

    It is what two figures say together: a step takes what it takes here, and what a rank sends beyond the other's, at
    the link's bandwidth. Nothing is expected to overlap more or less than here.
    """
    found = []
    for first, second in permutations([row for row in rows if row.step_ms and _sent(row)], 2):
        assert first.step_ms and second.step_ms
        more, faster_ms = _sent(first) - _sent(second), second.step_ms.step - first.step_ms.step
        if more > 0 and second.step_ms.step >= LEAST * first.step_ms.step:
            found.append(Crossing(first, second, 8e3 * more / faster_ms, more, faster_ms / 1e3))
    return sorted(found, key=lambda crossing: -crossing.bits_per_second)


def _sent(row: EngineResult) -> int:
    """The bytes that the rank that sends most sends a step."""
    return max((sum(cost.sent.values()) for cost in row.costs), default=0)
