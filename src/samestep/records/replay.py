"""The record of a replay: a script that runs again in one process, fed with what its ranks have read.

Each rank of the recording keeps `rankR.kept.pt`, and rank 0 the weights before the first and after the last step. The
replay writes `rank0.json`, as any rank of a script, and `replay.json`, a Replayed, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

REPLAYED = "replay.json"
FOLDER = "replay"  # of the replay's records, in the folder of the recording's
KEPT = "rank{}.kept.pt"
START, END = "start", "end"  # the names of rank 0's arrays
# How the ranks' batches are fed: as one; as one that goes through the model rank by rank; or one rank's at a time.
Feed = Literal["whole", "by rank", "in turn"]


@dataclass(frozen=True)
class ReplayPlan:
    """What to replay. record: the folder of the recording, of so many ranks. work: the folder to run in.

    in_turn: whether each micro-batch is one rank's, for a script that accumulates as many more on fewer ranks. rates,
    micro, calls: the recorded learning rates, and numbers of micro-batches and of calls of a closure, of each step.
    """

    record: str
    ranks: int
    work: str
    rates: list[list[float]]
    micro: list[int]
    in_turn: bool = False
    calls: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Distance:
    """Of one parameter's elements that the first gradient moves: the squares of how far the recorded steps have moved
    them, and of how far the replay's end from there."""

    moved: float
    off: float


@dataclass(frozen=True)
class Replayed:
    """How a replay went. why_not: the reason for which it cannot be judged; '' where it can.

    needs_turns: whether it is to be repeated with each rank's micro-batch in turn. micro: micro-batches of its first
    step; -1 where it did not end. base_rates: of each step, the rates from which a schedule starts; recorded: the same
    of the ranks. means: whether losses of the ranks were averaged, as their mean is computed inside of the model.
    """

    why_not: str
    feed: Feed = "whole"
    needs_turns: bool = False
    micro: int = -1
    distances: Mapping[str, Distance] = field(default_factory=dict)
    base_rates: list[list[float]] = field(default_factory=list)
    recorded_base_rates: list[list[float]] = field(default_factory=list)
    means: bool = False
