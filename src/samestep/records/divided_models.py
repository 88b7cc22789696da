"""What is recorded of a model that a script divides itself, with plain tensors, which do not say how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.records.call_site import CallSite

SMALL = 2.0**-16  # by which a replay multiplies gradients that nothing is to clip


@dataclass(frozen=True)
class TalkRecord:
    """What the ranks of one process group tell each other where a model computes: activations, and their gradients.

    forward, backward: operations called in training forwards, and in backward passes -> how often. between:
    point-to-point operations in neither, as those between the stages of a pipeline that a script writes itself.
    """

    ranks: list[int]
    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    between: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Moments:
    """Sums over the elements of tensors: of the values, their sizes, squares and cubes. They are the same in any order,
    and those of pieces add up. count: how many elements there are."""

    count: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)


@dataclass(frozen=True)
class ModuleRecord:
    """One call of a module in the first training forward: its inputs and outputs."""

    name: str
    given: Moments
    returned: Moments
    site: CallSite | None = None


@dataclass(frozen=True)
class HeldPiece:
    """What a rank holds of a parameter of one process: from `start` on, `length` of its elements along a dimension; a
    dimension of -1: all of it. name: by which the rank has it."""

    rank: int
    name: str
    dimension: int = -1
    start: int = 0
    length: int = 0
