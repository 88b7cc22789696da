"""What is recorded of a model that is divided over ranks: by DTensors and the stages of pipelines, which say how, or by
the script itself, with plain tensors, which do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samestep.records.call_site import CallSite

SMALL = 2.0**-16  # by which a replay multiplies gradients that nothing is to clip
Kind = Literal["shard", "replicate", "partial"]


@dataclass(frozen=True)
class MeshRecord:
    """A device mesh over which tensors are divided."""

    names: list[str]
    """Name of each dimension, 'dim 0' and so on where the mesh has no names."""

    shape: list[int]
    """Size of each dimension."""

    ranks: list[int]
    """Ranks of the mesh, with the last dimension going fastest."""


@dataclass(frozen=True)
class PieceRecord:
    """A rank's piece of one tensor, a DTensor."""

    mesh: int
    """Number of the mesh, as an index of `ScriptRecord.meshes`."""

    kinds: list[Kind]
    """What the ranks along each dimension of the mesh hold: other elements ('shard'), the same ones ('replicate'), or
    terms that are to be added up ('partial')."""

    offset: list[int]
    """Place of the piece's first element in the whole tensor, along each dimension of the tensor."""

    shape: list[int]
    """Shape of the piece."""

    data: int = 0
    """Number of the mesh's dimensions, the first ones, that are FSDP's. Along these the ranks train other rows."""


@dataclass(frozen=True)
class StageRecord:
    """A stage of a pipeline that a rank holds."""

    index: int
    """Number of the stage, from 0."""

    stages: int
    """Number of stages of the pipeline."""

    micro_batches: int
    """Number of micro-batches into which the schedule cuts a batch."""

    schedule: str
    """Class name of the schedule."""

    ranks: list[int]
    """Ranks of the pipeline's group."""

    model: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> its digest, for the whole model that the stage is cut out of. Empty: the rank does not have that
    model when it makes the stage."""


@dataclass(frozen=True)
class TalkRecord:
    """What the ranks of one group tell each other where a model computes: activations, and their gradients."""

    ranks: list[int]
    """Ranks of the group, in ascending order."""

    forward: Mapping[str, int] = field(default_factory=dict)
    """Operation -> number of its calls in training forwards."""

    backward: Mapping[str, int] = field(default_factory=dict)
    """Operation -> number of its calls in backward passes."""

    between: Mapping[str, int] = field(default_factory=dict)
    """Point-to-point operation -> number of its calls in neither, as between the stages of a pipeline that a script
    writes itself."""


@dataclass(frozen=True)
class Moments:
    """Sums over the elements of tensors. They are the same in any order of the elements, and those of pieces add up."""

    count: int = 0
    """Number of elements."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Sums of the values, of their absolute values, of their squares and of their cubes."""


@dataclass(frozen=True)
class ModuleRecord:
    """One call of a module in the first training forward."""

    name: str
    """Name of the module in the model. '' for the model itself."""

    given: Moments
    """Sums over the module's inputs."""

    returned: Moments
    """Sums over the module's outputs."""

    site: CallSite | None = None
    """Line where the module's forward begins. None: it is not the user's code."""


@dataclass(frozen=True)
class HeldPiece:
    """What a rank holds of a parameter of one process."""

    rank: int
    """Rank that holds the piece."""

    name: str
    """Name of the parameter on that rank."""

    dimension: int = -1
    """Dimension along which the parameter is cut. -1: the rank holds the whole parameter."""

    start: int = 0
    """Place of the piece's first element along `dimension`, from 0."""

    length: int = 0
    """Number of elements of the piece along `dimension`. 0 where the rank holds the whole parameter."""
