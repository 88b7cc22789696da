"""Which elements of a tensor a rank holds, and how what several ranks hold is put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from samestep.recorder.sharding import among_zeros, indices_of, whole_of

WHOLE = torch.arange(24.0).view(8, 3)


def held_at(place: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any], local: torch.Tensor) -> Any:
    mesh = SimpleNamespace(get_coordinate=lambda: [*place], size=lambda dimension: sizes[dimension])
    return SimpleNamespace(shape=WHOLE.shape, device_mesh=mesh, placements=placements, _local_tensor=local)


@pytest.mark.parametrize(
    ("place", "sizes", "placements", "rows"),
    [
        ((1,), (2,), [Shard(0)], [4, 5, 6, 7]),
        ((2,), (3,), [Shard(0)], [6, 7]),  # of pieces of three
        ((0,), (2,), [_StridedShard(0, split_factor=2)], [0, 1, 4, 5]),  # a half of gate, and of up
        ((1, 0), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], [2, 3]),  # FSDP2 over columns
        ((1, 0), (2, 2), [Replicate(), Shard(0)], [0, 1, 2, 3]),
    ],
)
def test_the_rows_that_a_rank_holds(
    place: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any], rows: list[int]
) -> None:
    tensor = held_at(place, sizes, placements, WHOLE[rows])
    indices = indices_of(tensor)
    assert [of.tolist() for of in indices] == [rows, [0, 1, 2]]
    expected = torch.zeros_like(WHOLE)
    expected[rows] = WHOLE[rows]
    assert torch.equal(among_zeros(tensor), expected)


def test_pieces_of_all_ranks_are_the_whole() -> None:
    fused = [_StridedShard(0, split_factor=2)]
    parts = [
        (WHOLE[rows], indices_of(held_at((rank,), (2,), fused, WHOLE[rows])))
        for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7]))
    ]
    assert torch.equal(whole_of(parts, WHOLE.shape), WHOLE)


def test_values_that_lie_end_to_end_are_the_whole() -> None:
    """As those of ZeRO's stage 3 do."""
    flat = WHOLE.view(-1)
    parts = [(flat[:13], [torch.arange(13)]), (flat[13:], [torch.arange(13, 24)])]
    assert torch.equal(whole_of(parts, WHOLE.shape), WHOLE)
