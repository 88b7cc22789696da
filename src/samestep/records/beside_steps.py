"""What a rank does beside its optimizer steps, as the recorder saw it: evaluation, random numbers, …"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_LOADER = -1


@dataclass(frozen=True)
class EvaluationSeen:
    """One pass over a DataLoader that is evaluated and not trained. number: of the pass, among all; NO_LOADER for
    forward passes of other data, which are kept only where the model has BatchNorm's statistics. step: how many
    optimizer steps had been taken. buffers: digests of the evaluated model's BatchNorm statistics.
    collectives: the operations called from its first forward up to the next training forward.
    """

    number: int
    step: int
    buffers: Mapping[str, int] = field(default_factory=dict)
    collectives: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RandomSeen:
    """Random generators. states: 'torch', 'numpy' and 'python' -> the digest of the state at the first training
    forward. draws: of each step, the digest of torch's state before its first training forward, '' where that forward
    draws no random number. workers: the seed from which a loader's workers take theirs, of each pass that has workers.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class GroupSeen:
    """The collectives of one process group, in their order. ranks: its members, empty where that is not known.

    calls: as 'all_reduce [16, 8] float': operation, shapes of the inputs, type. first: the number of the first one that
    is known, as older ones are forgotten.
    """

    ranks: list[int]
    calls: list[str]
    first: int = 1


@dataclass(frozen=True)
class SaveSeen:
    """A file that torch.save has written. file: its real path. step: how many steps had been taken by then."""

    file: str
    step: int
