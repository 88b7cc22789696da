"""Mesh: how ranks are arranged in replicas of the model, and how the ranks of one replica divide it.

The axes, the outermost first: ranks that differ in the last one alone are neighbours, since they send the most.

    stage      layers, as in a pipeline
    data       replicas that each have the whole model
    shard      replicas whose parameters are sharded, as under FSDP
    expert     replicas that each have some of the experts
    sequence   the positions of a sequence
    tensor     rows or columns of single weights

Along `data`, `shard` and `expert` ranks train on different rows; along the others they share a replica's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import prod

from samestep.errors import UserError, nearest_name
from samestep.message import message

DIGITS = 6  # of an axis's size
OTHER_SIZES = (3, 4, 6, 2)  # of an axis, for a second proof; models divide by 4 and by 6 more often than by 5 and by 7
MOST_RANKS = 8  # of a second proof, unless the first one has more
OF_REPLICAS = ("data", "shard", "expert")  # the axes along which ranks train on different rows


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis."""

    stage: int = 1
    """The number of stages, as in a pipeline, each of which has some of the layers."""

    data: int = 1
    """The number of replicas that each have the whole model."""

    shard: int = 1
    """The number of replicas whose parameters are sharded, as under FSDP."""

    expert: int = 1
    """The number of replicas that each have some of the experts."""

    sequence: int = 1
    """The number of ranks over which the positions of a sequence are divided."""

    tensor: int = 1
    """The number of ranks over which the rows or columns of single weights are divided."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its ranks, of the axes that have several; in the order of the axes."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """The number of replicas, which train on different rows."""
        return prod(size for axis, size in self.sizes.items() if axis in OF_REPLICAS)

    @property
    def parts(self) -> list[Mesh]:
        """The meshes of some of its axes, the smallest first: from that of one rank to this one."""
        counts = range(1 + len(self.sizes))
        return [self.along(axes) for count in counts for axes in combinations(self.sizes, count)]

    def along(self, axes: Iterable[str]) -> Mesh:
        """Returns the mesh of these axes; along the others there is one rank."""
        return Mesh(**{axis: self.sizes[axis] for axis in axes})

    def of_other_size(self, axes: Iterable[str], ranks: int | None = None) -> list[Mesh]:
        """Returns the meshes that differ from this one in the size of one axis, those first that show the most: other
        sizes of the axes that it has, in the order of `axes`, then two along one that it lacks.

        ranks: of such a mesh; None: at most MOST_RANKS, or as many as this one has.
        """
        order = [*(axis for axis in axes if axis in self.sizes), *(axis for axis in axes if axis in OF_REPLICAS)]
        found: dict[Mesh, None] = {}
        for axis in order:
            size, other_axes_size = getattr(self, axis), self.size // getattr(self, axis)
            if ranks is not None:
                sizes = [ranks // other_axes_size] if ranks % other_axes_size == 0 else []
            else:
                # A size that divides this one hides the same mistakes.
                sizes = sorted(OTHER_SIZES, key=lambda axis_size: size % axis_size == 0) if size > 1 else [2]
            found |= dict.fromkeys(replace(self, **{axis: axis_size}) for axis_size in sizes if axis_size != size)
        most = ranks or max(MOST_RANKS, self.size)
        return [mesh for mesh in found if mesh.size <= most]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's place along each axis that has several ranks."""
        places = {}
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        return places

    def replica(self, rank: int) -> int:
        """Returns the number of the replica that a rank belongs to."""
        places, replica = self.coordinates(rank), 0
        for axis, size in self.sizes.items():
            if axis in OF_REPLICAS:
                replica = replica * size + places[axis]
        return replica

    def __str__(self) -> str:
        """Returns 'data=2,tensor=2', as --mesh takes it; '' for one rank."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())

    def check_ranks(self, nproc: int, nnodes: int = 1) -> None:
        """Raises UserError where there are others than this mesh's ranks. nproc: on each of `nnodes` machines."""
        if self.size != nproc * nnodes:
            sizes = [str(size) for size in self.sizes.values()]
            product = " x ".join(sizes) if len(sizes) > 1 else None
            fields = {"mesh": str(self), "ranks": self.size, "nproc": nproc, "nnodes": nnodes if nnodes > 1 else None}
            raise UserError(message("mesh_of_other_ranks", product=product, **fields))


AXES = tuple(field.name for field in fields(Mesh))


def parse_mesh(given: str | Mapping[str, int]) -> Mesh | None:
    """Returns the mesh of 'data=2,tensor=2', or of {"data": 2, "tensor": 2}; None for an empty one. Raises UserError
    for another text."""
    pairs = [*given.items()] if isinstance(given, Mapping) else [tuple(part.split("=")) for part in given.split(",")]
    if not given:
        return None
    sizes: dict[str, int] = {}
    text = given if isinstance(given, str) else ",".join(f"{axis}={size}" for axis, size in pairs)
    for pair in pairs:
        axis, size = str(pair[0]).strip(), str(pair[-1]).strip()
        if len(pair) != 2 or not (size.isascii() and size.isdecimal() and len(size) <= DIGITS):
            raise UserError(message("mesh_is_malformed", mesh=text, axes=[*AXES]))
        if axis not in AXES:
            raise UserError(message("mesh_has_no_such_axis", mesh=text, axis=axis, hint=nearest_name(axis, [*AXES])))
        if axis in sizes or int(size) < 1:
            raise UserError(message("mesh_is_malformed", mesh=text, axes=[*AXES]))
        sizes[axis] = int(size)
    return Mesh(**sizes)
