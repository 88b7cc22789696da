"""A mesh: its replicas, the ranks that share one, and its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.errors import UserError
from samestep.world import World
from samestep.world.mesh import AXES, OF_REPLICAS, Mesh, parse_mesh


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 3}, {"stage": 2, "data": 3, "shard": 2, "tensor": 2}, {}])
def test_ranks_are_numbered_as_in_an_array_of_its_shape(sizes: dict[str, int]) -> None:
    mesh = Mesh(**sizes)
    numbers = np.arange(mesh.size).reshape([getattr(mesh, axis) for axis in AXES])  # as torch's DeviceMesh has them
    for rank in range(mesh.size):
        place = np.argwhere(numbers == rank)[0]
        assert mesh.coordinates(rank) == {axis: n for axis, n in zip(AXES, place) if getattr(mesh, axis) > 1}
        of_replica = [(n, getattr(mesh, axis)) for axis, n in zip(AXES, place) if axis in OF_REPLICAS]
        flat = 0
        for n, size in of_replica:
            flat = flat * size + int(n)
        assert mesh.replica(rank) == flat < mesh.replicas


def test_ranks_of_one_replica_are_neighbours_along_tensor() -> None:
    mesh = Mesh(data=2, tensor=2)
    worlds = [World(rank, 4, mesh=mesh) for rank in range(4)]
    assert [world.replica for world in worlds] == [0, 0, 1, 1]
    assert [world.begins_replica for world in worlds] == [True, False, True, False]
    assert {world.replicas for world in worlds} == {2}
    assert [World(rank, 4).replica for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("given", ["tensor=2,data=3", " data = 3 , tensor=2", {"tensor": 2, "data": 3}])
def test_one_spelling(given: str | dict[str, int]) -> None:
    assert parse_mesh(given) == Mesh(data=3, tensor=2)
    assert str(parse_mesh(given)) == "data=3,tensor=2"


def test_none_is_given() -> None:
    assert parse_mesh("") is None
    assert parse_mesh({}) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tensor", "mesh_is_malformed"),
        ("tensor=", "mesh_is_malformed"),
        ("tensor=0", "mesh_is_malformed"),
        ("tensor=-2", "mesh_is_malformed"),
        ("tensor=2=2", "mesh_is_malformed"),
        ("tensor=2,tensor=2", "mesh_is_malformed"),
        ("tensor=2,", "mesh_is_malformed"),
        ("tensor=9999999999", "mesh_is_malformed"),
        ("tensor=" + "9" * 5000, "mesh_is_malformed"),
        ("tensors=2", "mesh_has_no_such_axis"),
        ({"tp": 2}, "mesh_has_no_such_axis"),
    ],
)
def test_what_is_no_mesh(given: str | dict[str, int], said: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_mesh(given)
    assert raised.value.message.id == said


def test_its_arithmetic_is_in_the_error() -> None:
    Mesh(data=2, tensor=2).check_ranks(2, nnodes=2)
    with pytest.raises(UserError) as raised:
        Mesh(data=2, tensor=2).check_ranks(3)
    fields = {"mesh": "data=2,tensor=2", "ranks": 4, "nproc": 3, "nnodes": None, "product": "2 x 2"}
    assert raised.value.message.id == "mesh_of_other_ranks"
    assert dict(raised.value.message.fields) == fields


def test_its_parts_are_some_of_its_axes() -> None:
    parts = Mesh(stage=2, data=3, tensor=2).parts
    assert [str(part) for part in parts[:4]] == ["", "stage=2", "data=3", "tensor=2"]
    assert (len(parts), parts[0].size, parts[-1]) == (8, 1, Mesh(stage=2, data=3, tensor=2))
    assert Mesh().parts == [Mesh()]


@pytest.mark.parametrize(
    ("mesh", "axes", "ranks", "others"),
    [
        ("tensor=2", ("tensor", "data"), None, ["tensor=3", "tensor=4", "tensor=6", "data=2,tensor=2"]),
        ("data=2,tensor=2", ("tensor", "data"), None, ["data=2,tensor=3", "data=2,tensor=4", "data=3,tensor=2"]),
        ("stage=4", ("stage", "data", "shard"), None, ["stage=3", "stage=6", "stage=2"]),
        ("tensor=64", ("tensor", "data"), None, ["tensor=3", "tensor=6", "tensor=4", "tensor=2"]),
        ("data=2,tensor=2", ("tensor", "data"), 8, ["data=2,tensor=4", "data=4,tensor=2"]),
        ("data=2,tensor=2", ("tensor", "data"), 5, []),
    ],
)
def test_a_second_mesh_has_another_size_along_one_axis(
    mesh: str, axes: tuple[str, ...], ranks: int | None, others: list[str]
) -> None:
    given = parse_mesh(mesh)
    assert given
    found = [str(other) for other in given.of_other_size(axes, ranks)]
    assert found[: len(others)] == others and mesh not in found
