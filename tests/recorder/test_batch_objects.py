"""Batches that are objects of a script's own classes: what they hold is seen, joined and kept."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.job.walk import held_by_object, known_leaves
from samestep.recorder.batches import Packed, RowOrder, copied, is_joined, joined, moved_like

Named = namedtuple("Named", "x size")


class Images:
    def __init__(self, x: Tensor) -> None:
        self.x, self.size, self.inner = x, len(x), [{"boxes": x + 1}]


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    size: int


@pytest.mark.parametrize("kind", [Images, lambda x: Frozen(x, len(x)), lambda x: Named(x, len(x))])
def test_objects_are_joined_and_taken_apart(kind: Any) -> None:
    first, second = torch.ones(2, 3), torch.zeros(3, 3)
    parts = [Packed(copied(kind(rows))).opened() for rows in (first, second)]
    batch = joined(parts)
    assert type(batch) is type(parts[0]) and batch.size == 5
    assert torch.equal(batch.x, torch.cat([first, second]))
    assert torch.equal(parts[0].x, first)  # which is as it was
    assert torch.equal(RowOrder([2, 3], [*range(5)]).rows_of_rank(batch, 1).x, second)
    assert torch.equal(moved_like(batch, batch).x, batch.x)


def test_an_object_is_joined_of_what_it_holds() -> None:
    rows = torch.arange(6.0).view(2, 3)
    same, other = Images(rows), Images(rows)
    assert is_joined(same, [other]) and not is_joined(same, [Images(rows + 1)])
    assert torch.equal(joined([same, other]).inner[1]["boxes"], rows + 1)


def test_tensors_are_seen_in_objects_that_may_be_batches() -> None:
    rows = torch.ones(2, 3)
    assert [leaf.shape for leaf in known_leaves([Images(rows)]) if isinstance(leaf, Tensor)] == [(2, 3), (2, 3)]
    holder: Any = Images(rows)
    holder.itself = holder  # what refers to itself has an end
    assert known_leaves(holder)
    for other in (nn.Linear(1, 1), torch.Generator(), object(), Images, len, torch.optim.SGD([rows], 0.1)):
        assert held_by_object(other) is None
